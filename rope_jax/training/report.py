"""Reports of the training loop, and its guard against numbers that are not finite."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from rope_jax import data
from rope_jax.names.text import other_command
from rope_jax.system.cores import cores
from rope_jax.system.files import warn
from rope_jax.tasks import seeds
from rope_jax.training.checkpoint import Checkpoints, NonFinite
from rope_jax.training.folder import Run
from rope_jax.training.metrics import MetricsWriter, Profiler, Speedometer, progress_line
from rope_jax.training.setup import Setup, State, batch_ids
from rope_jax.training.signals import Interrupted, Signals
from rope_jax.training.trees import not_finite

SLOW_DATA = 0.1  # fraction of time spent waiting for images above which advice is printed
MAX_SKIPPED = 10  # steps in a row that non_finite="skip" skips before it stops the run


class Reporter:
    """Writes and prints metrics and events of a training loop, and saves its states.

    As a context manager around the loop, it writes the events "start" and "stop".
    """

    def __init__(self, setup: Setup, first: int, run: Run, signals: Signals):
        """Starts after step `first`, the last finished one."""
        config = setup.config
        self._setup, self._first, self._step = setup, first, first
        self._checkpoints, self._signals = run.checkpoints, signals
        self._writer = run.metrics(first, tensorboard=config.tensorboard)
        self._guard = FiniteGuard(setup, run.checkpoints, self._writer)
        self._speed = Speedometer(setup.total_steps, config.batch_size * config.seeds)
        self._profiler = Profiler(run.workdir)
        self._told_to_read_faster = False
        self._checkpoints.on_saved = self._on_saved

    def __enter__(self) -> "Reporter":
        last = self._writer.last_event
        if last is not None and last["event"] == "start":
            print("the last process was killed, or its machine went down", flush=True)
        self._writer.event(
            self._first,
            "start",
            resumes_from=self._first or None,
            total_steps=self._setup.total_steps,
            devices=self._setup.mesh.size,
        )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        with self._writer:
            try:
                if error is None:
                    self._writer.event(self._step, "stop", why="complete", resumes_from=self._step)
                else:
                    self._report_stop(error)
            finally:
                self._profile(self._profiler.close())

    def _report_stop(self, error: BaseException) -> None:
        last = self._checkpoints.newest()
        stopped = isinstance(error, Interrupted)
        why = f"stopped by {error}" if stopped else f"{type(error).__name__}: {error}"
        self._writer.event(self._step, "stop", why=why, resumes_from=last)
        total = self._setup.total_steps
        print(
            f"stopped at step {self._step} of {total}; newest checkpoint: step {last}", flush=True
        )

    @contextlib.contextmanager
    def waiting_for_batch(self, step: int) -> Iterator[None]:
        """Measures the time spent waiting for a batch, and starts the profiler if requested."""
        self._step = step
        begun = time.monotonic()
        yield
        self._speed.add_wait(time.monotonic() - begun)
        if self._signals.take_profile_request() or step == self._setup.config.profile_at:
            self._profiler.start(step)

    def after_dispatch(self, step: int, metrics: dict[str, Array]) -> None:
        """Ends the profile after the steps that it records."""
        self._profile(self._profiler.after(step, metrics))

    def report(self, step: int, metrics: dict[str, Array], skipped_images: int) -> None:
        """Fetches the metrics of a step, checks them, and writes those that are due.

        Raises:
            NonFinite: the loss or the gradient is not finite and the step may not be skipped.
        """
        config, total = self._setup.config, self._setup.total_steps
        values = jax.device_get(metrics)
        if not self._guard.check(step, values):
            return
        due = step % config.log_every == 0 or step == total
        speed = self._speed.at(step) if due or step == self._first + 1 else {}
        if not due:
            return
        if skipped_images:
            speed["skipped_images"] = skipped_images
        numbers = seeds.summary(values, config.all_seeds) | speed
        self._writer.write(step, numbers)
        print(progress_line(step, total, numbers), flush=True)
        slow = speed.get("data_wait", 0.0) > SLOW_DATA and not self._setup.images.in_memory
        if slow and not self._told_to_read_faster:
            self._told_to_read_faster = True
            self._tell_to_read_faster()

    def _tell_to_read_faster(self) -> None:
        """Prints advice for faster reading of images."""
        used, most = data.worker_count(self._setup.config.data.workers), cores()
        print(
            f"the steps wait for images, which {used or 'no'} worker processes decode on {most} "
            f"cores: --config.data.workers={most} (with the extra `data`), or store them resized "
            f"with {other_command('rope_jax.data.prepare')}",
            flush=True,
        )

    def save(self, step: int, state: State) -> None:
        """Starts to save the state.

        Raises:
            NonFinite: the state has a value that is not finite; nothing is saved.
        """
        try:
            self._checkpoints.save(step, state, about=self._setup.about())
        except NonFinite as error:
            raise self._guard.lost_state(step, state, error) from None

    def _on_saved(self, step: int, size: int, seconds: float) -> None:
        print(f"saved step {step}: {size / 1e6:.1f} MB in {seconds:.1f} s", flush=True)
        self._writer.event(step, "saved", bytes=size, seconds=round(seconds, 3))

    def _profile(self, folder: str | None) -> None:
        if folder is not None:
            print(f"profile of {Profiler.STEPS} steps: {folder}", flush=True)
            self._writer.event(self._step, "profile", folder=folder)


class FiniteGuard:
    """Checks the metrics of each step; its errors name the examples and the newest checkpoint."""

    def __init__(self, setup: Setup, checkpoints: Checkpoints, writer: MetricsWriter):
        self._setup, self._checkpoints, self._writer = setup, checkpoints, writer
        self._skipped = dict.fromkeys(setup.config.all_seeds, 0)  # in a row

    def check(self, step: int, values: dict[str, np.ndarray]) -> bool:
        """Checks whether the metrics of all seeds are finite.

        Raises:
            NonFinite: they are not, and the step may not be skipped.
        """
        config, all_finite = self._setup.config, True
        seed_values = zip(
            self._skipped,
            seeds.row_labels(config.all_seeds),
            np.ravel(values["loss"]),
            np.ravel(values["grad_norm"]),
            strict=True,
        )
        for seed, label, loss, norm in seed_values:
            if np.isfinite(loss) and np.isfinite(norm):
                self._skipped[seed] = 0
                continue
            all_finite = False
            self._skipped[seed] += 1
            count = self._skipped[seed]
            of_seed = f" of seed {seed}" if label else ""
            problem = f"step {step}{of_seed}: loss {loss}, gradient norm {norm}"
            if config.non_finite == "stop" or count > MAX_SKIPPED:
                before = f", after {count - 1} skipped steps in a row" if count > 1 else ""
                raise self._lost(step, seed, problem + before)
            warn(
                f"WARNING: {problem}; its update is skipped ({count} in a row). "
                f"Its examples: {self._examples(step, seed)}"
            )
            self._writer.event(step, "skipped", loss=str(loss), grad_norm=str(norm), **label)
        return all_finite

    def lost_state(self, step: int, state: State, error: NonFinite) -> NonFinite:
        """The error of a state that was not saved, with its first seed that is not finite."""
        config = self._setup.config
        trees = zip(config.all_seeds, seeds.split(state, config.seeds), strict=True)
        seed = next((seed for seed, tree in trees if not_finite(tree)), config.seed)
        of_seed = f" (seed {seed})" if config.seeds > 1 else ""
        return self._lost(step, seed, f"{error}{of_seed}")

    def _lost(self, step: int, seed: int, problem: str) -> NonFinite:
        last = self._checkpoints.newest()
        saved = "nothing was saved" if last is None else f"the newest checkpoint is of step {last}"
        return NonFinite(
            f"{problem}; {saved}. Lower --config.optim.learning_rate, or look at its examples: "
            f"{self._examples(step, seed)}"
        )

    def _examples(self, step: int, seed: int) -> str:
        return ", ".join(map(str, batch_ids(self._setup, step, seed)[:8])) + ", ..."
