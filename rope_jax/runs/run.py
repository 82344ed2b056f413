"""A run, from restoring or creating a model to training and evaluation.

`python -m rope_jax.main` calls `train` or `evaluate_newest` with a config and a workdir.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from rope_jax.analysis.plots import accuracy_against_resolution
from rope_jax.config import (
    Config,
    ConfigError,
    blame,
    differences,
    resolve_stored,
    settings,
    to_json,
)
from rope_jax.data.images.decode import decode_image
from rope_jax.evaluate import (
    draw_predictions,
    evaluate_state,
    main_score,
    planned_rows,
    results_table,
    rows_by_line,
    same_rows,
    usable_results,
    write_results,
)
from rope_jax.names import plugins
from rope_jax.names.text import closest
from rope_jax.runs import restore
from rope_jax.system.files import locked, read_json, set_aside, warn, write_file
from rope_jax.system.processes import decided_by_first
from rope_jax.system.sharding import state_shardings, with_shardings
from rope_jax.training import seeds
from rope_jax.training.agreement import about, agree, require_equal_weights, told_to_all
from rope_jax.training.checkpoint import Checkpoints
from rope_jax.training.kernels import choices_for_training, kernels_of_run
from rope_jax.training.loop import train_loop
from rope_jax.training.metrics import MetricsWriter, parameter_table, write_board
from rope_jax.training.paths import require_storable
from rope_jax.training.setup import Setup, State, initial_state, prepare
from rope_jax.training.signals import Signals, stop_signals


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
        SaveFailed: the last checkpoint could not be written, or the workdir is not this run's.
    """
    flags = {"mode": "train", "strict_restore": strict_restore, "resume_override": resume_override}
    with Run.open(config, workdir, flags) as run, contextlib.ExitStack() as stack:
        setup, model, signals = run.setup, run.model, run.signals
        config = setup.config
        with blame("--workdir"):
            checkpoints = stack.enter_context(
                Checkpoints(
                    workdir / "checkpoints", keep=config.keep_checkpoints, still_ours=run.still_ours
                )
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
            with blame("--workdir"):
                writer = MetricsWriter(workdir, restored_step=step, tensorboard=config.tensorboard)
            with writer:
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
    flags = {"mode": "evaluate", "strict_restore": strict_restore}
    flags |= {"resume_override": resume_override}
    with Run.open(config, workdir, flags) as run:
        with Checkpoints(workdir / "checkpoints") as checkpoints:
            state = load_newest(
                run.setup,
                run.model,
                checkpoints,
                workdir,
                strict=strict_restore,
                override=resume_override,
            )
        if state is None:
            raise _no_checkpoints(workdir)
        with kernels_of_run(run.setup.config, workdir):
            finish(run.setup, state, workdir, run.signals)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run whose workdir this process uses, see `Run.open`.

    Attributes:
        setup, model: see `prepare`.
        signals: to stop.
        still_ours: whether this process still has the workdir's lock, if it took it.
    """

    setup: Setup
    model: nnx.Module
    signals: Signals
    still_ours: Callable[[], bool]

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: Config, workdir: pathlib.Path, flags: dict[str, Any]) -> Iterator["Run"]:
        """Handles signals, locks the workdir, and prepares the run.

        Of several processes the first has the lock; all must have the same run before them.

        Raises:
            ConfigError: an impossible combination, a workdir that is in use, or another process
                that differs or cannot start.
        """
        still_ours = lambda: True
        with stop_signals() as signals, contextlib.ExitStack() as stack:
            with told_to_all():
                if flags["mode"] == "evaluate" and not (workdir / "checkpoints").is_dir():
                    raise _no_checkpoints(workdir)
                with blame("--workdir"):
                    require_storable(workdir)
                    if jax.process_index() == 0:
                        still_ours = stack.enter_context(locked(workdir))
                signals.saved = any(x.name.isdecimal() for x in (workdir / "checkpoints").glob("*"))
                setup, model = prepare(_with_plugins(config, workdir))
            if jax.process_count() > 1:
                facts = {f"--{name}": str(value) for name, value in flags.items()}
                agree(facts | about(setup, model), workdir)
            yield cls(setup, model, signals, still_ours)


def _with_plugins(config: Config, workdir: pathlib.Path) -> Config:
    """The config with its plug-ins and those of the run so far, which are loaded."""
    stored = None
    with blame("--workdir"), contextlib.suppress(FileNotFoundError, ValueError):  # new, or damaged
        stored = read_json(workdir / "config.json")
    with blame("--plugins"):
        plugins.load_installed()
        plugins.load(plugins.named_in(stored), wanted_by=f"of the run {workdir}")
        plugins.load(config.plugins)
    return dataclasses.replace(config, plugins=plugins.needed(to_json(config)))


def _no_checkpoints(workdir: pathlib.Path) -> ConfigError:
    return ConfigError(f"--workdir={workdir} holds no checkpoints: train first, with --mode=train")


def _fresh_state(setup: Setup, model: nnx.Module, workdir: pathlib.Path) -> State:
    """The state before the first step, from fresh weights or those of `init_from`."""
    config = setup.config
    results = workdir / "results.json"
    if jax.process_index() == 0 and os.path.lexists(results):
        set_aside(results, f"{results} is of a run whose checkpoints are gone")
    if config.init_from is not None:
        _start_from_weights(model, config)
    require_equal_weights(model)
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
    stored = resolve_stored(about["config"])
    changed = {line.partition(":")[0]: line for line in differences(stored, setup.config, override)}
    others = [name for name, value in setup.fingerprint.items() if about["data"][name] != value]
    if others and "images" not in override:
        changed["images"] = f"the images of the {' and '.join(others)} split"
    if changed:
        raise ConfigError(
            f"--workdir={workdir} holds a run of another config ({'; '.join(changed.values())}): "
            "use another workdir, or the same settings; where the arrays of the state stay as they "
            f"are, --resume_override={','.join(changed)} resumes with the new ones"
        )
    if overridden := differences(stored, setup.config):
        warn(f"WARNING: resuming with other settings: {'; '.join(overridden)}")
    shapes = jax.eval_shape(lambda: initial_state(setup, model))
    with blame("--workdir"):
        state = checkpoints.load(step, with_shardings(shapes, state_shardings(shapes, setup.mesh)))
    complete = ": training is complete" if step == setup.total_steps else ""
    print(f"found step {step} of {setup.total_steps} in {workdir}{complete}")
    return state


def finish(setup: Setup, state: State, workdir: pathlib.Path, signals: Signals) -> None:
    """Evaluates the state, unless it was evaluated before, and prints and draws the results."""
    config, step = setup.config, int(state["step"])
    first, wanted = jax.process_index() == 0, planned_rows(setup)
    with blame("--workdir"):
        results = decided_by_first(lambda: usable_results(workdir))
    evaluated = not (results and results["step"] == step and same_rows(results, wanted))
    rows = evaluate_state(setup, state, signals=signals) if evaluated else results["eval"]
    if not first:
        return
    if evaluated:
        write_results(workdir, step, rows)
    model = f"{config.model.name} with {config.model.position}"
    print(f"\n{rows[0]['dataset']} {rows[0]['split']}, {model}, step {step}")
    print(results_table(rows))
    lines = rows_by_line(config.model.position, rows)
    pictures = [accuracy_against_resolution(lines, workdir / "accuracy.png")]
    if setup.task.picture is not None and jax.process_count() == 1:
        pictures.append(workdir / setup.task.picture)
        if evaluated or not pictures[-1].is_file():
            draw_predictions(setup, state, pictures[-1])
    if evaluated and config.tensorboard:
        accuracies = {
            f"{main_score(row)}_{'x'.join(map(str, row['resolution']))}/{name}": row[
                main_score(row)
            ]
            for name, own in lines.items()
            for row in own
        }
        drawn = {path.stem: decode_image(path.read_bytes()) for path in pictures if path}
        write_board(workdir, step, numbers=accuracies, pictures=drawn)
    missing = "no picture: matplotlib is not installed (pip install 'rope_jax[plot]')"
    drawn = [f"picture: {picture}" for picture in pictures if picture]
    print("", *(drawn or [missing]), sep="\n")
