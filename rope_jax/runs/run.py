"""A run, from restoring or creating a model to training and evaluation.

`python -m rope_jax.main` calls `train` with a config and a workdir.
"""

import pathlib
from collections.abc import Sequence
from typing import Literal

import jax
from flax import nnx

from rope_jax.config import Config, blame
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
from rope_jax.evaluate.curves import accuracy_against_resolution
from rope_jax.evaluate.results import Row
from rope_jax.runs import restore
from rope_jax.system.files import SaveFailed
from rope_jax.system.processes import decide_by_first
from rope_jax.tasks import seeds
from rope_jax.training.agreement import (
    agree,
    describe_run,
    report_failure,
    require_equal,
    require_equal_weights,
)
from rope_jax.training.folder import Run
from rope_jax.training.kernels import choices_for_training, kernels_of_run
from rope_jax.training.loop import train_loop
from rope_jax.training.metrics import parameter_table, write_board
from rope_jax.training.setup import Setup, State, initial_state, prepare
from rope_jax.training.signals import Signals, stop_signals


def train(
    config: Config,
    workdir: pathlib.Path,
    *,
    mode: Literal["train", "evaluate"] = "train",
    strict_restore: bool = False,
    resume_override: Sequence[str] = (),
) -> None:
    """Trains or resumes a run, unless it is complete, and evaluates it.

    Args:
        config: of the run.
        workdir: the run's folder, which no other process may be using.
        mode: "evaluate" only evaluates the newest checkpoint, finished or not.
        strict_restore: stop at a damaged checkpoint instead of going back to a valid one.
        resume_override: settings (and "images") that may differ from the run that is resumed.

    Raises:
        ConfigError: an impossible combination, a workdir of another run, or "evaluate" without a
            checkpoint.
        Interrupted: a signal stopped the run; the last finished step is saved.
        NonFinite: the loss or a gradient is not finite; it is not saved.
        SaveFailed: the last checkpoint could not be written, or the workdir is not this run's.
    """
    with stop_signals() as signals, Run.open(workdir, mode, keep=config.keep_checkpoints) as run:
        setup, model = _prepare(config, run, strict_restore, resume_override)
        state = run.resume(setup, model, strict=strict_restore, override=resume_override)
        if state is None:
            state = start(setup, model)
        run.write_config(setup.config)
        if mode == "train":
            with choices_for_training(setup, state, workdir):
                state = train_loop(setup, state, run, signals)
                finish(setup, state, run, signals)
        else:
            with kernels_of_run(setup.config, workdir):
                finish(setup, state, run, signals)


def _prepare(
    config: Config, run: Run, strict_restore: bool, resume_override: Sequence[str]
) -> tuple[Setup, nnx.Module]:
    """Loads plug-ins, images and model; several processes compare them."""
    with report_failure():
        setup, model = prepare(run.with_plugins(config))
    if jax.process_count() > 1:
        flags = {
            "--mode": run.mode,
            "--strict_restore": str(strict_restore),
            "--resume_override": str(resume_override),
        }
        agree(flags | describe_run(setup, model), run.workdir)
    return setup, model


def start(setup: Setup, model: nnx.Module) -> State:
    """The state before the first step, from fresh weights or those of `init_from`."""
    config = setup.config
    if config.init_from is not None:
        steps = pathlib.Path(config.init_from, "checkpoints").glob("*/manifest.json")
        names = sorted(path.parent.name for path in steps)
        require_equal({f"the steps of --config.init_from={config.init_from}": str(names)})
        with report_failure():
            _start_from_weights(model, config)
        print(f"starting from the weights of {config.init_from}")
    require_equal_weights(model)
    state = initial_state(setup, model)
    print(parameter_table(seeds.take(state["params"], config.seeds)))
    return state


def _start_from_weights(model: nnx.Module, config: Config) -> None:
    """Loads the weights of `init_from` into the fresh models of all seeds, in place."""
    graph, stacked = nnx.split(model)
    states = []
    for state in seeds.split(stacked, config.seeds):
        seed_model = nnx.merge(graph, state)
        restore.start_from(seed_model, config.init_from, config.data)
        states.append(nnx.state(seed_model))
    nnx.update(model, seeds.stack(states))


def finish(setup: Setup, state: State, run: Run, signals: Signals) -> None:
    """Evaluates the state, unless it was evaluated before, and prints and draws the results.

    Raises:
        SaveFailed: something could not be written, or the workdir is no longer this run's.
    """
    step, workdir, expected = int(state["step"]), run.workdir, planned_rows(setup)
    with blame("--workdir"):
        results = decide_by_first(lambda: usable_results(workdir))
    stale = not (results and results["step"] == step and same_rows(results, expected))
    rows = evaluate_state(setup, state, signals=signals) if stale else results["eval"]
    decide_by_first(run.checkpoints.require_ours, SaveFailed)
    try:
        decide_by_first(lambda: _present(setup, state, workdir, rows, stale=stale), SaveFailed)
    except OSError as error:
        raise SaveFailed(
            f"{error}; step {step} is saved: run the same command again to write what is missing"
        ) from error


def _present(
    setup: Setup, state: State, workdir: pathlib.Path, rows: Sequence[Row], *, stale: bool
) -> None:
    """Writes rows that replace stale ones; prints and draws them."""
    config, step = setup.config, int(state["step"])
    if stale:
        write_results(workdir, step, rows)
    model = f"{config.model.name} with {config.model.position}"
    print(f"\n{rows[0]['dataset']} {rows[0]['split']}, {model}, step {step}")
    print(results_table(rows))
    lines = rows_by_line(config.model.position, rows)
    pictures = [accuracy_against_resolution(lines, workdir / "accuracy.png")]
    if setup.task.picture is not None and jax.process_count() == 1:
        pictures.append(workdir / setup.task.picture)
        if stale or not pictures[-1].is_file():
            draw_predictions(setup, state, pictures[-1])
    if stale and config.tensorboard:
        accuracies = {
            f"{main_score(row)}_{'x'.join(map(str, row['resolution']))}/{name}": row[
                main_score(row)
            ]
            for name, line_rows in lines.items()
            for row in line_rows
        }
        write_board(workdir, step, numbers=accuracies, pictures=filter(None, pictures))
    missing = "no picture: matplotlib is not installed (pip install 'rope_jax[plot]')"
    drawn = [f"picture: {picture}" for picture in pictures if picture]
    print("", *(drawn or [missing]), sep="\n")
