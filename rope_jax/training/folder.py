"""The folder of a run, as one object: lock, checkpoints, metrics, config and plug-ins."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
from flax import nnx

from rope_jax.config import (
    Config,
    ConfigError,
    blame,
    differences,
    resolve_stored,
    settings,
    to_json,
)
from rope_jax.names import plugins
from rope_jax.names.text import closest
from rope_jax.system.files import SaveFailed, lock, read_json, set_aside, warn, write_file
from rope_jax.system.processes import decide_by_first
from rope_jax.system.sharding import state_shardings, with_shardings
from rope_jax.training.agreement import report_failure
from rope_jax.training.checkpoint import Checkpoints
from rope_jax.training.metrics import MetricsWriter
from rope_jax.training.paths import require_storable
from rope_jax.training.setup import Setup, State, initial_state
from rope_jax.training.signals import Interrupted


@dataclasses.dataclass(frozen=True)
class Run:
    """A run whose folder no other process may use, see `open`.

    Attributes:
        workdir: the folder.
        mode: "train", or "evaluate", which leaves checkpoints and metrics as they are.
        checkpoints: of the run.
    """

    workdir: pathlib.Path
    mode: Literal["train", "evaluate"]
    checkpoints: Checkpoints

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, workdir: pathlib.Path, mode: Literal["train", "evaluate"], *, keep: int | None = None
    ) -> Iterator["Run"]:
        """Locks the folder, which is created to train; of several processes the first has the lock.

        An `Interrupted` in this context records whether a checkpoint is saved. Errors before the
        context end the other processes where they `agree`.

        Args:
            workdir: the folder.
            mode: see `Run`.
            keep: number of checkpoints that are kept; None for all.

        Raises:
            ConfigError: the folder is in use or cannot be used; or "evaluate", and there are no
                checkpoints.
        """
        folder, still_ours = workdir / "checkpoints", lambda: True
        with contextlib.ExitStack() as stack:
            with report_failure():
                if mode == "evaluate" and not folder.is_dir():
                    raise _no_checkpoints(workdir)
                with blame("--workdir"):
                    require_storable(workdir)
                    if jax.process_index() == 0:
                        still_ours = stack.enter_context(lock(workdir))
            checkpoints = Checkpoints(folder, keep=keep, still_ours=still_ours)
            run = cls(workdir, mode, stack.enter_context(checkpoints))
            try:
                yield run
            except Interrupted as error:
                error.saved = bool(checkpoints.steps())
                raise

    def with_plugins(self, config: Config) -> Config:
        """The config with its plug-ins and those of the run so far, which are loaded."""
        stored = None
        with blame("--workdir"), contextlib.suppress(FileNotFoundError, ValueError):  # new, damaged
            stored = read_json(self.workdir / "config.json")
        with blame("--plugins"):
            plugins.load_installed()
            plugins.load(plugins.stored_names(stored), required_by=f"of the run {self.workdir}")
            plugins.load(config.plugins)
        return dataclasses.replace(config, plugins=plugins.find_needed(to_json(config)))

    def resume(
        self,
        setup: Setup,
        model: nnx.Module,
        *,
        strict: bool = False,
        override: Sequence[str] = (),
    ) -> State | None:
        """The newest valid state; None if there is none yet, which is an error to evaluate.

        Args:
            setup, model: of the run.
            strict: stop at a damaged checkpoint instead of going back to a valid one.
            override: settings (and "images") that may differ from those of the checkpoint.

        Raises:
            ConfigError: the state of another config, or one that cannot be read.
        """
        names = [*settings(), "images"]
        for name in override:
            if name not in names:
                hint = closest(name, names)
                raise ConfigError(f"--resume_override={name} is not a setting; {hint}")
        training = self.mode == "train"
        with blame("--workdir"):
            if training:
                self.checkpoints.clean()
            step = self.checkpoints.newest_verified(strict=strict, rename=training)
            metadata = None if step is None else self.checkpoints.about(step)
        if step is None and not training:
            raise _no_checkpoints(self.workdir)
        if step is None:
            results = self.workdir / "results.json"
            if jax.process_index() == 0 and os.path.lexists(results):
                set_aside(results, f"{results} is of a run whose checkpoints are gone")
            return None
        self._require_same_run(setup, metadata, override)
        shapes = jax.eval_shape(lambda: initial_state(setup, model))
        shapes = with_shardings(shapes, state_shardings(shapes, setup.mesh))
        with blame("--workdir"):
            state = self.checkpoints.load(step, shapes)
        complete = ": training is complete" if step == setup.total_steps else ""
        print(f"found step {step} of {setup.total_steps} in {self.workdir}{complete}")
        return state

    def _require_same_run(
        self, setup: Setup, metadata: dict[str, Any], override: Sequence[str]
    ) -> None:
        """Rejects a checkpoint of another config or other images, except for what may differ."""
        stored = resolve_stored(metadata.get("config"), f"the checkpoint of {self.workdir}")
        data = metadata["data"] if isinstance(metadata.get("data"), dict) else {}
        lines = differences(stored, setup.config, override)
        changed = {line.partition(":")[0]: line for line in lines}
        # The fingerprint of an earlier version is the beginning of today's.
        others = [n for n, x in setup.fingerprint.items() if not x.startswith(str(data.get(n)))]
        if others and "images" not in override:
            changed["images"] = f"the images of the {' and '.join(others)} split differ"
        if changed:
            raise ConfigError(
                f"--workdir={self.workdir} holds a run of another config "
                f"({'; '.join(changed.values())}): use another workdir, or the same settings; "
                "where the arrays of the state stay as they are, "
                f"--resume_override={','.join(changed)} resumes with the new ones"
            )
        if overridden := differences(stored, setup.config):
            warn(f"WARNING: resuming with other settings: {'; '.join(overridden)}")

    def write_config(self, config: Config) -> None:
        """Writes `config.json`, and sets aside results that were computed with other settings.

        An evaluation writes it only in that case.
        """
        decide_by_first(self.checkpoints.require_ours, SaveFailed)
        if jax.process_index() > 0:
            return
        path, results = self.workdir / "config.json", self.workdir / "results.json"
        before = config
        with contextlib.suppress(FileNotFoundError, ValueError, ConfigError):  # new, damaged, old
            before = resolve_stored(read_json(path), path)
        changed = differences(before, config)
        if changed and os.path.lexists(results):
            reason = f"{results} was computed with other settings ({'; '.join(changed)})"
            set_aside(results, reason, "before")
        if changed or self.mode == "train":
            write_file(path, to_json(config) + "\n")

    def metrics(self, step: int, *, tensorboard: bool) -> MetricsWriter:
        """Opens `metrics.jsonl` and drops its lines after `step`."""
        decide_by_first(self.checkpoints.require_ours, SaveFailed)
        with blame("--workdir"):
            return MetricsWriter(self.workdir, restored_step=step, tensorboard=tensorboard)


def _no_checkpoints(workdir: pathlib.Path) -> ConfigError:
    problem = "holds no checkpoints" if workdir.is_dir() else "does not exist"
    return ConfigError(f"--workdir={workdir} {problem}: train first, with --mode=train")
