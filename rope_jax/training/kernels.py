"""The kernels that a run uses, by its setting `kernels`.

With "tuned" they are measured before the first step and kept in the workdir, so that a resumed run
computes the same bits.
"""

import contextlib
import pathlib

import jax

from rope_jax.config import Config, ConfigError
from rope_jax.system.files import read_regular, warn, write_file
from rope_jax.system.processes import decide_by_first
from rope_jax.system.sharding import put_batch
from rope_jax.training.setup import Setup, State, training_batches
from rope_jax.training.step import make_step
from rope_jax_kernels import Call, Choices, device, record, tune
from rope_jax_kernels.tuning.choices import slugify
from rope_jax_kernels.tuning.measure import nothing_to_tune

_LARGEST = 1 << 28  # bytes of the file of choices


def choices_file(workdir: pathlib.Path) -> pathlib.Path:
    """The file of the choices in a workdir, one for each kind of device that trained it."""
    return workdir / f"kernels_{slugify(device.kind())}.json"


def stored_choices(kernels: str, workdir: pathlib.Path) -> Choices | None:
    """The choices that follow from the setting `kernels` or are in the workdir.

    Returns:
        The choices; None for those that have yet to be measured, or need not be, without kernels.

    Raises:
        ConfigError: the file in the workdir is damaged.
    """
    if kernels == "default":
        return Choices()
    if kernels != "tuned":
        return Choices(everywhere=kernels)
    path = choices_file(workdir)
    read = lambda: read_regular(path, at_most=_LARGEST).decode() if path.exists() else ""
    try:
        text = decide_by_first(read)
        choices = Choices.from_json(text) if text else None
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{path} cannot be used ({error}): restore it, or delete it to measure the kernels "
            "again, which may change the last bits of the results [--workdir]"
        ) from error
    if choices is None and (others := sorted(workdir.glob("kernels_*.json"))):
        warn(
            f"WARNING: the choices of kernels in {others[0]} are for another kind of device and "
            "are not used here, which may change the last bits of the results"
        )
    if choices is not None and (reason := choices.misfit()):
        warn(f"WARNING: the choices of kernels in {path} are not used: they were {reason}")
        return None
    return choices


def kernels_of_run(
    config: Config | None, workdir: pathlib.Path | None
) -> contextlib.AbstractContextManager:
    """A context in which a run's model computes with the kernels that it was trained with.

    These are the workdir's, which is not changed; without any, those of the built-in preferences.
    For a model without a run (None), the context does nothing.

    Raises:
        ConfigError: the file in the workdir is damaged.
    """
    if config is None or workdir is None:
        return contextlib.nullcontext()
    return stored_choices(config.kernels, workdir) or Choices()


def choices_for_training(setup: Setup, state: State, workdir: pathlib.Path) -> Choices:
    """The choices for a run: the stored ones, or measured by the first process if steps are left.

    Raises:
        ConfigError: the file in the workdir is damaged.
        Interrupted: a signal stopped the run; nothing is written.
        SaveFailed: the choices could not be written to the workdir.
    """
    choices = stored_choices(setup.config.kernels, workdir)
    if choices is not None:
        return choices
    if int(state["step"]) >= setup.total_steps or nothing_to_tune():
        return Choices()
    choices = _measure(setup, state)
    # An error here ends the first process, and thereby the others, which wait for its choices.
    if jax.process_index() == 0:
        write_file(choices_file(workdir), choices.to_json())
    return Choices.from_json(decide_by_first(choices.to_json))


def _measure(setup: Setup, state: State) -> Choices:
    """Measures choices in the first process; none in the others, or if measuring fails."""
    try:
        calls = trace_step(setup, state)  # in every process: it moves arrays to all devices
        if jax.process_index() > 0:
            return Choices()
        print("measuring the kernels on this device", flush=True)
        return tune(calls, say=warn)
    except Exception as error:  # nothing else that happens here may stop a training
        warn(f"WARNING: the kernels could not be measured ({error!r}): built-in preferences")
        return Choices()


def trace_step(setup: Setup, state: State) -> list[Call]:
    """Traces the kernel calls in a training step on each device."""
    batches, resident = training_batches(setup, int(state["step"]))
    with contextlib.closing(batches):
        batch = put_batch(next(batches), setup.mesh) | resident
    with record() as calls:
        jax.eval_shape(make_step(setup), state, batch)
    return calls
