"""A run, from restoring or creating a model to training and evaluation.

`python -m rope_jax.main` calls `train` or `evaluate_newest` with a config and a workdir.
"""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence

import jax
from flax import nnx

from rope_jax import restore, seeds
from rope_jax.analysis.plots import accuracy_against_resolution
from rope_jax.config import Config, ConfigError, blame, differences, resolve, settings, to_json
from rope_jax.evaluate import (
    evaluate_state,
    planned_rows,
    read_results,
    results_table,
    rows_by_line,
    same_rows,
    write_results,
)
from rope_jax.files import locked, warn, write_file
from rope_jax.sharding import from_first_process, state_shardings, with_shardings
from rope_jax.text import closest
from rope_jax.training.kernels import choices_for_training, kernels_of_run
from rope_jax.training.loop import train_loop
from rope_jax.training.setup import Setup, State, initial_state, prepare
from rope_jax.training.signals import Signals, stop_signals
from rope_jax.workdir.checkpoint import Checkpoints
from rope_jax.workdir.metrics import MetricsWriter, parameter_table


def train(
    config: Config,
    workdir: pathlib.Path,
    *,
    strict_restore: bool = False,
    resume_override: Sequence[str] = (),
) -> None:
    """Trains or resumes a run, unless it is complete, and evaluates it.

    Args:
        config: of the run.
        workdir: the run's folder, which no other process may be using.
        strict_restore: stop at a damaged checkpoint instead of going back to a valid one.
        resume_override: settings (and "images") that may differ from the run that is resumed.

    Raises:
        ConfigError: an impossible combination, or a workdir of another run.
        Interrupted: a signal stopped the run; the last finished step is saved.
        NonFinite: the loss or a gradient is not finite; it is not saved.
        SaveFailed: a checkpoint or a line of metrics could not be written.
    """
    with _held(workdir) as signals, contextlib.ExitStack() as stack:
        signals.saved = any(path.name.isdecimal() for path in (workdir / "checkpoints").glob("*"))
        setup, model = prepare(config)
        config = setup.config
        with blame("--workdir"):
            checkpoints = stack.enter_context(
                Checkpoints(workdir / "checkpoints", keep=config.keep_checkpoints)
            )
            checkpoints.clean()
        state = load_newest(
            setup,
            model,
            checkpoints,
            workdir,
            strict=strict_restore,
            override=resume_override,
            rename=True,
        )
        signals.saved = state is not None
        if state is None:
            state = _fresh_state(setup, model, workdir)
        if jax.process_index() == 0:
            write_file(workdir / "config.json", to_json(config) + "\n")
        step = int(state["step"])
        if step < setup.total_steps:
            stack.enter_context(choices_for_training(setup, state, workdir))
            with MetricsWriter(
                workdir, restored_step=step, tensorboard=config.tensorboard
            ) as writer:
                state = train_loop(setup, state, checkpoints, writer, signals, workdir)
        else:
            stack.enter_context(kernels_of_run(config, workdir))
        finish(setup, state, workdir, signals)


def evaluate_newest(
    config: Config,
    workdir: pathlib.Path,
    *,
    strict_restore: bool = False,
    resume_override: Sequence[str] = (),
) -> None:
    """Evaluates the newest checkpoint of a run, finished or not. Arguments as in `train`.

    Raises:
        ConfigError: there is no checkpoint, or it belongs to another run.
    """
    missing = f"--workdir={workdir} holds no checkpoints: train first, with --mode=train"
    if not (workdir / "checkpoints").is_dir():
        raise ConfigError(missing)
    with _held(workdir) as signals:
        signals.saved = True
        setup, model = prepare(config)
        with Checkpoints(workdir / "checkpoints") as checkpoints:
            state = load_newest(
                setup,
                model,
                checkpoints,
                workdir,
                strict=strict_restore,
                override=resume_override,
            )
        if state is None:
            raise ConfigError(missing)
        with kernels_of_run(setup.config, workdir):
            finish(setup, state, workdir, signals)


@contextlib.contextmanager
def _held(workdir: pathlib.Path) -> Iterator[Signals]:
    """Handles signals and holds the workdir's lock (with several processes, in the first)."""
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(stop_signals())
        with blame("--workdir"):
            if jax.process_index() == 0:
                stack.enter_context(locked(workdir))
        yield signals


def _fresh_state(setup: Setup, model: nnx.Module, workdir: pathlib.Path) -> State:
    """The state before the first step, from fresh weights or those of `init_from`."""
    config = setup.config
    if jax.process_index() == 0:
        (workdir / "results.json").unlink(missing_ok=True)  # of a run that was moved away
    if config.init_from is not None:
        _start_from_weights(model, config)
    state = initial_state(setup, model)
    print(parameter_table(seeds.take(state["params"], config)))
    return state


def _start_from_weights(model: nnx.Module, config: Config) -> None:
    """Loads the weights of `init_from` into the fresh model, in place; into that of every seed."""
    graph, stacked = nnx.split(model)
    states = []
    for seed, state in zip(seeds.seeds_of(config), seeds.split(stacked, config), strict=True):
        one = nnx.merge(graph, state)
        restore.start_from(one, seeds.single(config, seed))
        states.append(nnx.state(one))
    nnx.update(model, seeds.stack(states))


def load_newest(
    setup: Setup,
    model: nnx.Module,
    checkpoints: Checkpoints,
    workdir: pathlib.Path,
    *,
    strict: bool = False,
    override: Sequence[str] = (),
    rename: bool = False,
) -> State | None:
    """The newest valid state, or None without one; rejects the state of another config.

    See `Checkpoints.newest_verified` for `strict` and `rename`; `override` as in `train`.
    """
    known = [*settings(), "images"]
    for name in override:
        if name not in known:
            raise ConfigError(f"--resume_override={name} is not a setting; {closest(name, known)}")
    with blame("--workdir"):
        step = checkpoints.newest_verified(strict=strict, rename=rename)
        if step is None:
            return None
        about = checkpoints.about(step)
    stored = resolve(about["config"])
    changed = {line.partition(":")[0]: line for line in differences(stored, setup.config, override)}
    if "images" not in override:
        others = [
            split for split, value in setup.fingerprint.items() if about["data"][split] != value
        ]
        if others:
            changed["images"] = f"the images of the {' and '.join(others)} split"
    if changed:
        raise ConfigError(
            f"--workdir={workdir} holds a run of another config ({'; '.join(changed.values())}): "
            "use another workdir, or the same settings; "
            f"--resume_override={','.join(changed)} resumes with the new ones"
        )
    if overridden := differences(stored, setup.config):
        warn(f"WARNING: resuming with other settings: {'; '.join(overridden)}")
    shapes = jax.eval_shape(lambda: initial_state(setup, model))
    with blame("--workdir"):
        state = checkpoints.load(step, with_shardings(shapes, state_shardings(shapes, setup.mesh)))
    complete = ": training is complete" if step == setup.total_steps else ""
    print(f"found step {step} of {setup.total_steps} in {workdir}{complete}")
    return state


def finish(setup: Setup, state: State, workdir: pathlib.Path, poll: Callable[[], None]) -> None:
    """Evaluates the state, unless it was evaluated before, and prints and draws the results."""
    config, step = setup.config, int(state["step"])
    results = read_results(workdir)
    wanted = planned_rows(setup)
    if from_first_process(
        results is None or results["step"] != step or not same_rows(results, wanted)
    ):
        rows = evaluate_state(setup, state, poll=poll)
        if jax.process_index() == 0:
            write_results(workdir, step, rows)
    else:
        rows = results["eval"]
    if jax.process_index() > 0:
        return
    model = f"{config.model.name} with {config.model.position}"
    print(f"\n{rows[0]['dataset']} {rows[0]['split']}, {model}, step {step}")
    print(results_table(rows))
    lines = rows_by_line(config.model.position, rows)
    picture = accuracy_against_resolution(lines, workdir / "accuracy.png")
    missing = "no picture: matplotlib is not installed (pip install 'rope_jax[plot]')"
    print(f"\npicture: {picture}" if picture else f"\n{missing}")
