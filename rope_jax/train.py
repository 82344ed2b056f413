"""Training: the loop around the step of a run, its checkpoints, and what it tells.

What a step does is in `rope_jax.run`.
"""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from rope_jax import members, restore
from rope_jax.analysis.plots import accuracy_against_resolution
from rope_jax.checkpoint import Checkpoints, not_finite
from rope_jax.config import COSMETIC, SEMANTIC, Config, ConfigError, blame, differences, resolve, to_json
from rope_jax.data import order
from rope_jax.evaluate import Row, evaluate, protocol, read_results, resolutions, results_table, write_results
from rope_jax.hints import closest
from rope_jax.metrics import MetricsWriter, Profiler, Progress, parameter_table, progress_line
from rope_jax.models.registry import image_pair
from rope_jax.run import Run, State, feed, initial_state, make_step, prepare
from rope_jax.sharding import like, of_first, put_batch, state_shardings
from rope_jax.signals import Interrupted, Signals, stop_signals
from rope_jax.workdir import locked, warn, write_file

MAX_SKIPPED = 10  # steps in a row whose numbers are not finite, before a run with non_finite="skip" stops


class NonFinite(Exception):
    """The loss or a gradient is not finite; the message names the step."""


def train(config: Config, workdir: pathlib.Path, *, strict_restore: bool = False, resume_override: Sequence[str] = ()) -> None:
    """Trains, or resumes, or finds nothing left to do; then evaluates. Leaves its files in `workdir`.

    Args:
        config: of the run.
        workdir: its folder, which no other process may be using.
        strict_restore: stop at a damaged checkpoint instead of going back to one that verifies.
        resume_override: config fields (and "images") that may differ from those of the run that is resumed.

    Raises:
        ConfigError: an impossible combination, or a workdir of another run, or one that cannot be used.
        Interrupted: the run was asked to stop; a checkpoint of the last finished step is on disk.
        NonFinite: the loss or a gradient is not finite; nothing of it is on disk.
        SaveFailed: a checkpoint or a line of metrics could not be written.
    """
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(stop_signals())
        with blame("--workdir"):
            if jax.process_index() == 0:
                stack.enter_context(locked(workdir))
        signals.saved = any(path.name.isdecimal() for path in (workdir / "checkpoints").glob("*"))
        run, model = prepare(config)
        config = run.config
        with blame("--workdir"):
            checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", keep=config.keep_checkpoints))
            checkpoints.clean()
        state = load_newest(run, model, checkpoints, workdir, strict=strict_restore, override=resume_override, rename=True)
        signals.saved = state is not None
        if state is None:
            if jax.process_index() == 0:
                (workdir / "results.json").unlink(missing_ok=True)  # of a run whose checkpoints were moved away
            if config.init_from is not None:
                model = _started(model, config)
            state = initial_state(run, model)
            print(parameter_table(state["params"] if config.seeds == 1 else members.take(state["params"], 0)))
        if jax.process_index() == 0:
            write_file(workdir / "config.json", to_json(config) + "\n")
        if int(state["step"]) < run.total_steps:
            with MetricsWriter(workdir, restored_step=int(state["step"]), tensorboard=config.tensorboard) as writer:
                state = loop(run, state, checkpoints, writer, signals, workdir)
        finish(run, state, workdir, signals)


def _started(model: nnx.Module, config: Config) -> nnx.Module:
    """The model with the weights of `init_from`: those of all seeds start from the same."""
    models = [model] if config.seeds == 1 else members.part(model, config.seeds)
    for seed, each in zip(members.seeds(config), models, strict=True):
        restore.start_from(each, members.config_of(config, seed))
    return model if config.seeds == 1 else members.join(models)


def evaluate_newest(config: Config, workdir: pathlib.Path, *, strict_restore: bool = False, resume_override: Sequence[str] = ()) -> None:
    """Evaluates the newest checkpoint of a run, finished or not, at the config's resolutions. Arguments as in `train`.

    Raises:
        ConfigError: there is no checkpoint, or it is of another run.
    """
    missing = ConfigError(f"--workdir={workdir} holds no checkpoints: train first, with --mode=train")
    if not (workdir / "checkpoints").is_dir():
        raise missing
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(stop_signals())
        signals.saved = True
        with blame("--workdir"):
            if jax.process_index() == 0:
                stack.enter_context(locked(workdir))
        run, model = prepare(config)
        with Checkpoints(workdir / "checkpoints") as checkpoints:
            state = load_newest(run, model, checkpoints, workdir, strict=strict_restore, override=resume_override)
        if state is None:
            raise missing
        finish(run, state, workdir, signals)


def load_newest(
    run: Run,
    model: nnx.Module,
    checkpoints: Checkpoints,
    workdir: pathlib.Path,
    *,
    strict: bool = False,
    override: Sequence[str] = (),
    rename: bool = False,
) -> State | None:
    """The newest state on disk that verifies, or None; refuses that of a run with another config, fields of `override` aside.

    See `Checkpoints.newest_verified` for `strict` and `rename`.
    """
    for name in override:
        if name not in (*SEMANTIC, *COSMETIC, "images"):
            raise ConfigError(f"--resume_override={name} is not a setting; {closest(name, (*SEMANTIC, 'images'))}")
    with blame("--workdir"):
        step = checkpoints.newest_verified(strict=strict, rename=rename)
        if step is None:
            return None
        about = checkpoints.about(step)
    stored = resolve(about["config"])
    changed = differences(stored, run.config, override)
    if "images" not in override:
        changed += [f"the images of the {split} split" for split, value in run.fingerprint.items() if about["data"][split] != value]
    if changed:
        names = ",".join(dict.fromkeys("images" if line.startswith("the images") else line.partition(":")[0] for line in changed))
        raise ConfigError(
            f"--workdir={workdir} holds a run of another config ({'; '.join(changed)}): use another workdir, or the same settings; "
            f"--resume_override={names} goes on with the new ones"
        )
    if overridden := differences(stored, run.config):
        warn(f"WARNING: going on with other settings: {'; '.join(overridden)}")
    shapes = jax.eval_shape(lambda: initial_state(run, model))
    with blame("--workdir"):
        state = checkpoints.load(step, like(shapes, state_shardings(shapes, run.mesh)))
    print(f"found step {step} of {run.total_steps} in {workdir}" + (": training is complete" if step == run.total_steps else ""))
    return state


def loop(run: Run, state: State, checkpoints: Checkpoints, writer: MetricsWriter, signals: Signals, workdir: pathlib.Path) -> State:
    """Runs the remaining steps. The metrics of a step are fetched while the next one runs, and checkpoints written beside all that.

    Before the first step of this process there is nothing that a signal could make us save: it ends the run at once. Later it ends it
    after the step under way.
    """
    config = run.config
    first = step = int(state["step"])
    train_step = make_step(run)
    progress = Progress(total_steps=run.total_steps, batch_size=config.batch_size * config.seeds)
    profiler = Profiler(workdir)
    skipped = dict.fromkeys(members.seeds(config), 0)  # in a row

    def examples(step: int, seed: int) -> str:
        count, repeats = len(run.images.labels), config.data.repeats
        numbers = order.examples(step - 1, batch_size=config.batch_size, seed=seed, count=count, repeats=repeats)
        return ", ".join(map(str, numbers[:8])) + ", ..."

    def lost(step: int, seed: int, told: str) -> NonFinite:
        last = checkpoints.newest()
        saved = "nothing was saved" if last is None else f"the newest checkpoint is of step {last}"
        return NonFinite(f"{told}; {saved}. Lower --config.optim.learning_rate, or look at its examples: {examples(step, seed)}")

    def check(step: int, values: dict[str, np.ndarray]) -> bool:
        """Whether all that a step computed is finite; stops the run, or says what is skipped, where it is not."""
        fine = True
        each = zip(skipped, members.names(config), np.ravel(values["loss"]), np.ravel(values["grad_norm"]), strict=True)
        for seed, name, loss, norm in each:
            if np.isfinite(loss) and np.isfinite(norm):
                skipped[seed] = 0
                continue
            fine = False
            skipped[seed] += 1
            told = f"step {step}{f' of seed {seed}' if name else ''}: loss {loss}, gradient norm {norm}"
            if config.non_finite == "stop" or skipped[seed] > MAX_SKIPPED:
                often = f", after {MAX_SKIPPED} skipped steps in a row" if skipped[seed] > MAX_SKIPPED else ""
                raise lost(step, seed, told + often)
            warn(f"WARNING: {told}; its update is skipped ({skipped[seed]} in a row). Its examples: {examples(step, seed)}")
            writer.event(step, "skipped", loss=str(loss), grad_norm=str(norm), **name)
        return fine

    def report(step: int, metrics: dict[str, Array]) -> None:
        values = jax.device_get(metrics)
        if not check(step, values):
            return
        logged = step % config.log_every == 0 or step == run.total_steps
        speed = progress.at(step) if logged or step == first + 1 else {}
        if logged:
            if batches.skipped:
                speed |= {"skipped_images": len(batches.skipped)}
            numbers = {name: float(value) for name, value in values.items()} if config.seeds == 1 else members.summary(values, config)
            writer.write(step, numbers | speed)
            print(progress_line(step, run.total_steps, numbers | speed), flush=True)

    def save(step: int, state: State) -> None:
        try:
            checkpoints.save(step, state, about=run.about())
        except ValueError as error:
            trees = [state] if config.seeds == 1 else [members.take(state, member) for member in range(config.seeds)]
            seed = next((seed for seed, tree in zip(members.seeds(config), trees, strict=True) if not_finite(tree)), config.seed)
            raise lost(step, seed, f"{error}{f' (seed {seed})' if config.seeds > 1 else ''}") from None

    def on_saved(step: int, size: int, seconds: float) -> None:
        signals.saved = True
        print(f"saved step {step}: {size / 1e6:.1f} MB in {seconds:.1f} s", flush=True)
        writer.event(step, "saved", bytes=size, seconds=round(seconds, 3))

    def profile(folder: str | None) -> None:
        if folder is not None:
            print(f"profile of {Profiler.STEPS} steps: {folder}", flush=True)
            writer.event(step, "profile", folder=folder)

    if writer.last_event is not None and writer.last_event["event"] == "start":
        print("the process before this one ended without a word: it was killed, or the machine went down", flush=True)
    writer.event(first, "start", resumes_from=first if signals.saved else None, total_steps=run.total_steps, devices=run.mesh.size)
    checkpoints.on_saved = on_saved
    batches, resident = feed(run, first)
    pending = None
    try:
        for step in range(first + 1, run.total_steps + 1):
            begun = time.monotonic()
            batch = put_batch(next(batches), run.mesh) | resident
            progress.waited(time.monotonic() - begun)
            if signals.profile_wanted() or step == config.profile_at:
                profiler.start(step)
            # After the first step, which compiles, nothing may move to the devices that was not put there.
            with jax.transfer_guard_host_to_device("allow" if step == first + 1 else "disallow"):
                state, metrics = train_step(state, batch)
            signals.at_once = False
            if pending is not None:
                report(*pending)
            pending = (step, metrics)
            profile(profiler.after(step, metrics))
            try:
                signals()
            except Interrupted:
                report(*pending)
                save(step, state)
                checkpoints.wait()
                raise
            if step % config.checkpoint_every == 0 or step == run.total_steps:
                report(*pending)
                pending = None
                save(step, state)
        checkpoints.wait()
    except BaseException as error:
        last = checkpoints.newest()
        why = f"stopped by {error}" if isinstance(error, Interrupted) else f"{type(error).__name__}: {error}"
        writer.event(step, "stop", why=why, resumes_from=last)
        print(f"stopped at step {step} of {run.total_steps}; the newest checkpoint is of step {last}", flush=True)
        raise
    finally:
        profile(profiler.close())
        batches.close()
    writer.event(step, "stop", why="complete", resumes_from=step)
    signals.at_once = True  # everything is saved
    signals()  # and a signal may have come meanwhile
    return state


def finish(run: Run, state: State, workdir: pathlib.Path, poll: Callable[[], None]) -> None:
    """Evaluates the state, unless that was done in the same way, and shows what came of it."""
    config, step = run.config, int(state["step"])
    how = protocol(run.images, config)
    sizes = resolutions(config, image_pair(config.data.image_size))
    wanted = [{"resolution": list(size), "protocol": how} | name for size in sizes for name in members.names(config)]
    results = read_results(workdir)
    kept = ("resolution", "protocol", "seed")
    done = [] if results is None else [{key: row[key] for key in kept if key in row} for row in results["eval"]]
    if of_first(results is None or results["step"] != step or done != wanted):
        weights = (state["ema" if config.averaged else "params"], state.get("stats", {}))
        if config.seeds == 1:
            apply = lambda weights, images: run.apply(*weights, images)[0]
        else:
            weights = (*weights, run.rest)
            apply = lambda weights, images: dataclasses.replace(run, rest=weights[2]).apply(*weights[:2], images)[0]
        rows = evaluate(apply, weights, config, run.mesh, poll=poll)
        if jax.process_index() == 0:
            write_results(workdir, step, rows)
    else:
        rows = results["eval"]
    if jax.process_index() > 0:
        return
    print(f"\n{rows[0]['dataset']} {rows[0]['split']}, {config.model.name} with {config.model.position}, step {step}")
    print(results_table(rows))
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(f"{config.model.position}, seed {row['seed']}" if "seed" in row else config.model.position, []).append(row)
    picture = accuracy_against_resolution(lines, workdir / "accuracy.png")
    print(f"\npicture: {picture}" if picture else "\nno picture: matplotlib is not installed (pip install 'rope_jax[plot]')")
