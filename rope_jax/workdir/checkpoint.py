"""Atomic checkpoints: one folder per step, complete or absent, with a hash of every file.

A save copies the arrays and returns. A thread writes them to `<step>.writing/`, reads them back
and compares every bit, hashes every file into `manifest.json`, syncs everything to disk, and only
then renames the folder to `<step>/`: a checkpoint that was reported as saved can be restored, and
survives any crash. A step is valid only if its files match its manifest.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost
from orbax.checkpoint import v1 as ocp

from rope_jax.files import RETRY_AFTER, SaveFailed, open_regular, warn
from rope_jax.workdir import steps
from rope_jax.workdir.failures import (
    TOO_FEW,
    free_space,
    human_size,
    is_transient,
    quiet_failures,
    reading,
    reason_of,
)
from rope_jax.workdir.integrity import Damaged, problem_of, seal
from rope_jax.workdir.paths import for_orbax, require_storable
from rope_jax.workdir.trees import check_tree, named_leaves, not_finite, same_bits

_READ_WITHIN = 300  # seconds that processes wait for the slowest, as in orbax


class NonFinite(ArithmeticError):
    """The loss, a gradient or a weight is not finite; the message names the step."""


class Checkpoints:
    """The checkpoints of a run, in `folder/<step>/`; leaving the context waits for the last save.

    A state is a dict of trees; each entry has its own folder and can be read alone. With several
    processes all call every method; the first one reads the disk and decides.

    Attributes:
        on_saved: called with (step, bytes, seconds) in the writing thread when a step is on disk.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        keep: int | None = None,
        still_ours: Callable[[], bool] = lambda: True,
    ):
        """Opens the folder (created if missing).

        Args:
            folder: of all steps.
            keep: only the newest `keep` valid steps are kept; None for all.
            still_ours: whether this process may write there, see `rope_jax.files.locked`.

        Raises:
            ValueError: no checkpoint can be stored below this path (`require_storable`).
        """
        require_storable(folder)
        self._folder, self._keep, self._still_ours = folder.absolute(), keep, still_ours
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="rope_jax.workdir.checkpoint"
        )
        self._quiet = contextlib.ExitStack()
        self._pending: concurrent.futures.Future | None = None
        self.on_saved: Callable[[int, int, float], None] = lambda step, size, seconds: None

    def __enter__(self) -> "Checkpoints":
        self._quiet.enter_context(quiet_failures())
        return self

    def __exit__(self, kind: Any, exception: Any, traceback: Any) -> None:
        try:
            if exception is None:
                self.wait()
            # Other processes may not have met this exception: nothing to agree on with them.
            elif self._pending is not None and (error := self._pending.exception()) is not None:
                warn(str(error))  # the exception that ended the run is reported elsewhere
        finally:
            self._thread.shutdown()
            self._quiet.close()

    def steps(self) -> list[int]:
        """All steps, valid or not, ascending.

        Raises:
            Damaged: something else than a folder (a link, a file) has the name of a step.
        """
        return steps.listed(self._folder)

    def newest(self) -> int | None:
        """The newest step, or None. Waits for a pending save."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])
        return max(steps.present(self._folder), default=None)

    def newest_verified(self, *, strict: bool = False, rename: bool = False) -> int | None:
        """The newest valid step; None if there never was one.

        Args:
            strict: stop at a damaged step instead of falling back to the previous one.
            rename: rename damaged steps to `<step>.corrupt`; they are never deleted.

        Raises:
            Damaged: no step is valid; or `strict`, and the newest one is not.
        """
        elsewhere = Damaged(
            "the first process found no checkpoint that can be used; see its message"
        )
        return _decided(lambda: self._newest_verified(strict, rename), elsewhere)

    def _newest_verified(self, strict: bool, rename: bool) -> int | None:
        bad = []
        for step in reversed(self.steps()):
            problem = self.problem(step)
            if problem is None:
                return step
            told = f"checkpoint {self._folder / str(step)} is damaged: {problem}"
            if strict:
                raise Damaged(
                    f"{told}; without --strict_restore the newest one that verifies is taken"
                )
            bad.append(steps.set_aside(self._folder, step).name if rename else str(step))
            warn(
                f"WARNING: {told}; looking for an older one"
                + (f". It is kept as {bad[-1]}" if rename else "")
            )
        bad += (
            [path.name for path in self._folder.glob("*.corrupt*") if path.name not in bad]
            if self._folder.is_dir()
            else []
        )
        if bad:
            raise Damaged(
                f"no checkpoint in {self._folder} verifies ({', '.join(sorted(bad))}): repair "
                "one, or move that folder away to start from scratch"
            )
        return None

    def problem(self, step: int) -> str | None:
        """A description of the damage to a step's files; None for a valid step.

        Raises:
            OSError: they cannot be read.
        """
        return problem_of(self._folder / str(step), step)

    def clean(self) -> None:
        """Removes unfinished saves and deletions. Only for the process that holds the lock."""
        if jax.process_index() == 0:
            steps.remove_unfinished(self._folder)

    def save(self, step: int, state: dict[str, Any], *, about: dict) -> None:
        """Starts to write a state, with `about` as JSON. An existing step is not overwritten.

        The arrays may be donated as soon as this returns. Waits for the previous save.

        Raises:
            NonFinite: a value is not finite; nothing is written.
            SaveFailed: the previous save failed, or the folder is no longer this run's.
        """
        self.wait()

        def is_there() -> int:
            self._require_ours(step)
            return int(step in steps.present(self._folder))

        elsewhere = SaveFailed(
            f"step {step} is not saved: the first process cannot save it; see its message"
        )
        if _decided(is_there, elsewhere):
            return
        bad = not_finite(state)
        if bad:
            names = ", ".join(bad[:3]) + (" is" if len(bad) == 1 else " are")
            raise NonFinite(f"step {step} is not saved: {names} not finite")
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        path = for_orbax(self._folder / f"{step}.writing")
        begin = lambda state: ocp.save_checkpointables_async(path, state, custom_metadata=about)
        begun = None
        if jax.process_count() == 1:
            state = jax.device_get(state)  # for retries of a failed write
            if jax.default_backend() == "cpu":  # views of buffers that the next step overwrites
                state = jax.tree.map(np.copy, state)
        held = jax.tree.map(_Held.of, state)
        if jax.process_count() > 1:  # every process writes its part; orbax copies it now
            begun = begin(state)

        def write() -> None:
            (begun or begin(state)).result()
            try:
                _read_back(path, held, about)
            except Exception as error:  # orbax raises exceptions of any type
                raise ValueError(f"it cannot be read back: {reason_of(error)}") from error
            if jax.process_count() > 1:  # sealed only once all have read back theirs
                wait = multihost.get_barrier_sync_fn()
                wait(key=f"rope_jax: {path} is read back", timeout_ms=1000 * _READ_WITHIN)

        self._pending = self._thread.submit(self._write, step, size, write)

    def wait(self) -> None:
        """Waits for the pending save.

        Raises:
            SaveFailed: it failed.
        """
        if self._pending is None:
            return
        error, self._pending = self._pending.exception(), None
        failed = error is not None
        if jax.process_count() > 1:
            failed = bool(multihost_utils.process_allgather(np.array(failed)).any())
        if failed:
            raise error or SaveFailed(
                "another process could not write its part of a checkpoint; see its message"
            )

    def _require_ours(self, step: int) -> None:
        try:
            ours = self._still_ours()
        except OSError:  # it cannot be told now; writing will fail if the folder is gone
            return
        if not ours:
            raise SaveFailed(
                f"step {step} is not saved: {self._folder.parent} was deleted or moved, or another "
                "run has taken its place"
            )

    def _write(self, step: int, size: int, arrays: Callable[[], None]) -> None:
        """Writes, seals and prunes, in the thread; retries transient errors."""
        begun = time.monotonic()
        for pause in (*RETRY_AFTER, None):
            try:
                self._require_ours(step)
                if not self._folder.is_dir():
                    raise FileNotFoundError(
                        errno.ENOENT, os.strerror(errno.ENOENT), str(self._folder)
                    )
                if jax.process_count() == 1:
                    shutil.rmtree(self._folder / f"{step}.writing", ignore_errors=True)
                arrays()
                if jax.process_index() == 0:
                    self._seal(step)
                break
            except Exception as error:  # orbax and tensorstore raise exceptions of any type
                self._require_ours(step)  # the cause, if it is not
                if pause is not None and jax.process_count() == 1 and is_transient(error):
                    time.sleep(pause)
                    continue
                raise SaveFailed(
                    f"step {step} could not be saved in {self._folder}: {reason_of(error)}. It "
                    f"needs {human_size(size)}, {free_space(self._folder)}; "
                    "older checkpoints are untouched, and the same command goes on from the "
                    "newest one"
                ) from error
        if jax.process_index() == 0:
            self.on_saved(step, size, time.monotonic() - begun)
            try:
                self._prune()
            except OSError as error:
                warn(
                    f"WARNING: step {step} is saved, but older checkpoints could not be removed: "
                    f"{error}"
                )

    def _seal(self, step: int) -> None:
        """Makes a folder that was written the folder of its step."""
        written = self._folder / f"{step}.writing"
        seal(written, step)
        self._require_ours(step)
        steps.complete(written, step)

    def _prune(self) -> None:
        """Deletes all but the newest `keep` steps; the newest one was just read back."""
        if self._keep is not None:
            for step in steps.present(self._folder)[: -self._keep]:
                steps.delete(self._folder, step)

    def load(self, step: int, shapes: dict[str, Any]) -> dict[str, Any]:
        """Reads a state, or the entries of it that are named in `shapes`.

        Args:
            step: of a valid checkpoint.
            shapes: trees of `jax.ShapeDtypeStruct`s with shardings, by entry.

        Raises:
            ValueError: names, shapes or dtypes on disk differ.
            Damaged: the state is of another step.
            OSError: it cannot be read.
        """
        found = self._metadata(step).metadata
        check_tree(shapes, {name: found[name] for name in shapes if name in found})
        with reading(self._folder / str(step)):
            state = ocp.load_checkpointables(for_orbax(self._folder / str(step)), shapes)
        if "step" in state and int(state["step"]) != step:
            raise Damaged(
                f"checkpoint {self._folder / str(step)} holds the state of step {state['step']}: "
                "it was renamed or put together by hand; move it away"
            )
        return state

    def about(self, step: int) -> dict:
        """The metadata stored with a state.

        Raises:
            Damaged: it is missing.
            OSError: it cannot be read.
        """
        about = self._metadata(step).custom_metadata
        if not about:
            raise Damaged(
                f"checkpoint {self._folder / str(step)} is damaged: its metadata is missing; "
                "remove that folder"
            )
        return about

    def _metadata(self, step: int) -> Any:
        """What orbax stored beside the arrays; of what it cannot read, it returns None."""
        folder = self._folder / str(step)
        with reading(folder):
            metadata = ocp.checkpointables_metadata(for_orbax(folder))
        if unread := [name for name, tree in metadata.metadata.items() if tree is None]:
            with open_regular(folder / unread[0] / "_METADATA"):  # raises the cause, if it lasts
                raise OSError(f"{folder / unread[0]} could not be read: {TOO_FEW}")
        return metadata


@dataclasses.dataclass(frozen=True)
class _Held:
    """The parts of an array that this process reads back: each part in one process only.

    Attributes:
        shape, dtype: of the whole array.
        parts: the index of each part into it, and a copy on the host.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: list[tuple[Any, np.ndarray]]

    @classmethod
    def of(cls, leaf: Any) -> "_Held":
        parts = [(..., leaf)]
        if jax.process_count() > 1:
            shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
            parts = [(shard.index, np.array(shard.data)) for shard in shards]
        return cls(leaf.shape, leaf.dtype, parts)


def _read_back(folder: os.PathLike, held: dict[str, Any], about: dict) -> None:
    """Compares what was written with what it should be; an entry at a time, on the host.

    Raises:
        ValueError: something differs. Orbax raises exceptions of any type.
    """
    stored = ocp.checkpointables_metadata(folder)
    check_tree(held, {name: stored.metadata.get(name) for name in held})
    if (stored.custom_metadata or {}) != json.loads(json.dumps(about)):
        raise ValueError("the metadata is not what was written")
    # An array of one number in memory, for its shape and dtype; `...` is not read.
    shape = lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape) if x.parts else ...
    for name, tree in held.items():
        read = ocp.load_checkpointables(folder, {name: jax.tree.map(shape, tree)})[name]
        arrays = jax.tree.structure(tree).flatten_up_to(read)
        for (leaf, here), array in zip(named_leaves({name: tree}), arrays, strict=True):
            if not all(same_bits(array[index], part) for index, part in here.parts):
                raise ValueError(f"{leaf} has other bits than were written")


def _decided(choose: Callable[[], int | None], elsewhere: Exception) -> int | None:
    """The first process's choice, in all processes; its error, and `elsewhere` in the others."""
    if jax.process_count() == 1:
        return choose()
    nothing, failed = -1, -2
    code, error = failed, None
    if jax.process_index() == 0:
        try:
            chosen = choose()
            code = nothing if chosen is None else chosen
        except (ValueError, OSError) as caught:
            error = caught
    code = int(multihost_utils.broadcast_one_to_all(np.int32(code)))
    if code == failed:
        raise error or elsewhere
    return None if code == nothing else code
