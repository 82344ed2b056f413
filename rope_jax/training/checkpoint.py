"""Atomic checkpoints: one folder per step, complete or absent, with a hash of every file.

A save copies the arrays and returns. A thread writes them to `<step>.writing/`, reads them back
and compares every bit, hashes every file into `manifest.json`, syncs everything to disk, and only
then renames the folder to `<step>/`: a checkpoint that was reported as saved can be restored, and
survives any crash. A step is valid only if its files match its manifest; a damaged one becomes
`<step>.corrupt/`, and one that is being removed `<step>.deleting/`.
"""

import concurrent.futures
import contextlib
import json
import logging
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import multihost
from orbax.checkpoint import v1 as ocp

from rope_jax.system.files import SaveFailed, set_aside, sync, warn
from rope_jax.system.processes import decide_by_first, gather_texts
from rope_jax.training.integrity import Damaged, find_problem, seal
from rope_jax.training.paths import for_orbax
from rope_jax.training.trees import check_tree, first_problems, named_leaves, not_finite, same_bits

_STEP = re.compile(r"0|[1-9]\d*", re.ASCII)
# Leftovers of a crash: the only names that are ever deleted.
_UNFINISHED = re.compile(r"\d+\.(writing|deleting)(\..*)?")
_READ_WITHIN = 300  # seconds that processes wait for the slowest, as in orbax
_ASK_EVERY = 1  # seconds


def _no_traces_of_threads(record: logging.LogRecord) -> bool:
    """A save that fails is reported in one line; orbax's threads would log a trace each."""
    return "_SignalingThread.run()" not in str(record.msg)


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
        """Creates nothing: see `clean`.

        Args:
            folder: of all steps, created by `clean`; `paths.require_storable` must accept it.
            keep: only the newest `keep` steps are kept; None for all.
            still_ours: checks that this process may write there, see `rope_jax.system.files.lock`.
        """
        self._folder, self._keep, self._still_ours = folder.absolute(), keep, still_ours
        logging.getLogger("absl").addFilter(_no_traces_of_threads)
        self._pending: concurrent.futures.Future | None = None
        self.on_saved: Callable[[int, int, float], None] = lambda step, size, seconds: None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, exception: Any, traceback: Any) -> None:
        if exception is None:  # otherwise other processes may not come to agree on the end
            self.wait()
        elif self._pending is not None:
            concurrent.futures.wait([self._pending])

    def steps(self) -> list[int]:
        """All steps, valid or not, ascending."""
        names = os.listdir(self._folder) if self._folder.exists() else []
        return sorted(int(name) for name in names if _STEP.fullmatch(name))

    def newest(self) -> int | None:
        """The newest step, or None. Waits for a pending save."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])
        return max(self.steps(), default=None)

    def newest_verified(self, *, strict: bool = False, rename: bool = False) -> int | None:
        """The newest valid step; None if there never was one.

        Args:
            strict: stop at a damaged step instead of falling back to the previous one.
            rename: rename damaged steps to `<step>.corrupt`; they are never deleted.

        Raises:
            Damaged: no step is valid; or `strict`, and the newest one is not.
            OSError: a step cannot be read.
        """
        return decide_by_first(lambda: self._newest_verified(strict, rename))

    def _newest_verified(self, strict: bool, rename: bool) -> int | None:
        for step in reversed(self.steps()):
            problem = self.problem(step)
            if problem is None:
                return step
            path = self._folder / str(step)
            damage = f"checkpoint {path} is damaged: {problem}"
            if strict:
                raise Damaged(
                    f"{damage}; without --strict_restore the newest one that verifies is taken"
                )
            if rename:
                set_aside(path, f"{damage}; looking for an older one", "corrupt")
            else:
                warn(f"WARNING: {damage}; looking for an older one")
        corrupt = sorted(path.name for path in self._folder.glob("*.corrupt*"))
        if bad := [*map(str, self.steps()), *corrupt]:
            raise Damaged(
                f"no checkpoint in {self._folder} verifies ({', '.join(bad)}): repair one, or "
                "move that folder away to start from scratch"
            )
        return None

    def problem(self, step: int) -> str | None:
        """A description of the damage to a step's files; None for a valid step.

        Raises:
            OSError: they cannot be read.
        """
        with self._reading(step):
            return find_problem(self._folder / str(step), step)

    def clean(self) -> None:
        """Creates the folder, or removes unfinished saves and deletions in it.

        Raises:
            OSError: in all processes, if it cannot be created.
        """
        decide_by_first(lambda: self._folder.mkdir(parents=True, exist_ok=True))
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        if jax.process_index() == 0:
            for path in self._folder.glob("*"):
                if _UNFINISHED.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def save(self, step: int, state: dict[str, Any], *, about: dict) -> None:
        """Starts to write a state, with `about` as JSON. An existing step is not overwritten.

        The arrays may be donated as soon as this returns. Waits for the previous save; if that
        failed, a warning has said so, and this one is the next attempt.

        Raises:
            NonFinite: a value is not finite; nothing is written.
            SaveFailed: the folder is no longer this run's.
        """
        with contextlib.suppress(SaveFailed):
            self.wait()
        decide_by_first(self.require_ours, SaveFailed)
        self._remove_unfinished()
        if decide_by_first(lambda: os.path.isdir(self._folder / str(step))):
            return
        if bad := not_finite(state):
            raise NonFinite(f"step {step} is not saved: {first_problems(bad)}, not finite")
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        path = for_orbax(self._folder / f"{step}.writing")
        options = ocp.Context()
        options.asynchronous.timeout_secs = None  # which orbax measures by the wall clock

        def begin(state: dict[str, Any]) -> Any:
            with options:
                return ocp.save_checkpointables_async(path, state, custom_metadata=about)

        if jax.process_count() > 1:
            write = begin(state).result  # every process writes its part; orbax copies it now
        else:
            state = jax.device_get(state)
            if jax.default_backend() == "cpu":  # views of buffers that the next step overwrites
                state = jax.tree.map(np.copy, state)
            write = lambda: begin(state).result()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        parts = jax.tree.map(_parts, state)
        read_back = lambda: _read_back(path, shapes, parts, about)
        # A thread of its own: that of a save which another process could not finish may still wait.
        thread = concurrent.futures.ThreadPoolExecutor(1)
        self._pending = thread.submit(self._write, step, size, write, read_back)

    def wait(self) -> None:
        """Waits for the pending save.

        A process that fails leaves the others waiting for it inside orbax, so all ask each other.

        Raises:
            SaveFailed: it failed, in any of the processes.
        """
        if self._pending is None:
            return
        outcomes = [None]  # of each process: an error, "" for none, None while it writes
        while None in outcomes and not any(outcomes):
            concurrent.futures.wait([self._pending], timeout=_ASK_EVERY)
            done = self._pending.done()
            outcome = str(self._pending.exception() or "") if done else None
            outcomes = [json.loads(text) for text in gather_texts(json.dumps(outcome))]
        self._pending = None
        if failures := [outcome for outcome in outcomes if outcome]:
            raise SaveFailed(failures[0])

    def require_ours(self) -> None:
        """One check before each write.

        Raises:
            SaveFailed: the workdir is no longer this run's.
        """
        if not self._still_ours():
            raise SaveFailed(
                f"{self._folder.parent} was deleted or moved, or another run has taken its place"
            )

    def _write(
        self, step: int, size: int, write: Callable[[], Any], read_back: Callable[[], None]
    ) -> None:
        """Writes a step, reads it back, seals it and renames it, then prunes; in the thread."""
        begun, path = time.monotonic(), self._folder / f"{step}.writing"
        try:
            write()
            read_back()
            all_have = multihost.get_barrier_sync_fn()
            all_have(key=f"rope_jax: {path} is read back", timeout_ms=1000 * _READ_WITHIN)
            if jax.process_index() == 0:
                seal(path, step)
                self.require_ours()
                path.rename(self._folder / str(step))
                sync(self._folder)
        except Exception as error:  # orbax and tensorstore raise exceptions of any type
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            failure = SaveFailed(
                f"step {step} could not be saved in {self._folder}: {reason}; older checkpoints "
                "are untouched"
            )
            warn(f"WARNING: {failure}")
            raise failure from error
        if jax.process_index() == 0:
            self.on_saved(step, size, time.monotonic() - begun)
            with contextlib.suppress(OSError):  # steps that cannot be deleted stay
                self._prune()

    def _prune(self) -> None:
        """Deletes all steps except the newest `keep`; other files and links are not touched.

        Each is renamed first, so that no part of it is ever mistaken for a complete one.
        """
        paths = [self._folder / str(step) for step in self.steps()]
        folders = [path for path in paths if path.is_dir() and not path.is_symlink()]
        for path in folders[: -self._keep] if self._keep else []:
            shutil.rmtree(path.rename(path.with_suffix(".deleting")))

    def load(self, step: int, shapes: dict[str, Any]) -> dict[str, Any]:
        """Reads a state, or the entries of it that are named in `shapes`.

        Args:
            step: of a valid checkpoint.
            shapes: trees of `jax.ShapeDtypeStruct`s with shardings, by entry.

        Raises:
            ValueError: names, shapes or dtypes on disk differ.
            OSError: it cannot be read.
        """
        folder = for_orbax(self._folder / str(step))
        with self._reading(step):
            stored = ocp.checkpointables_metadata(folder).metadata
            if unread := [name for name in shapes if stored.get(name, ...) is None]:
                raise OSError(f"orbax cannot read the metadata of {unread[0]}")
        check_tree(shapes, {name: stored.get(name) for name in shapes})
        with self._reading(step):
            return ocp.load_checkpointables(folder, shapes)

    def about(self, step: int) -> dict:
        """The metadata stored with a state; none if it is not a dictionary.

        Raises:
            OSError: it cannot be read.
        """
        with self._reading(step):
            folder = for_orbax(self._folder / str(step))
            metadata = ocp.checkpointables_metadata(folder).custom_metadata
            return metadata if isinstance(metadata, dict) else {}

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Turns any error into an OSError: orbax and tensorstore raise exceptions of all types."""
        try:
            yield
        except Exception as error:
            raise OSError(
                f"checkpoint {step} in {self._folder} cannot be read ({error}); it may be intact "
                "and was not renamed. The usual causes are the disk, missing rights, too few file "
                "handles (ulimit -n) and too little memory: start again once it can be read"
            ) from error


def _parts(leaf: Any) -> list[tuple[Any, np.ndarray]]:
    """The parts of an array that this process reads back, on the host, each after its index.

    With several processes, each has other parts; a part with copies belongs to one of them.
    """
    if jax.process_count() == 1:
        return [(..., leaf)]
    shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    return [(shard.index, np.array(shard.data)) for shard in shards]


def _read_back(
    folder: os.PathLike, shapes: dict[str, Any], parts: dict[str, Any], about: dict
) -> None:
    """Compares a written state with the intended one, one entry at a time, on the host.

    Raises:
        ValueError: something differs. Orbax raises exceptions of any type.
    """
    stored = ocp.checkpointables_metadata(folder)
    check_tree(shapes, {name: stored.metadata.get(name) for name in shapes})
    if (stored.custom_metadata or {}) != json.loads(json.dumps(about)):
        raise ValueError("the metadata is not what was written")
    # An array of one number in memory, for its shape and dtype; `...` is not read.
    template = lambda x, shards: np.broadcast_to(np.zeros((), x.dtype), x.shape) if shards else ...
    equal_bits = lambda array, shards: all(same_bits(array[index], part) for index, part in shards)
    for name, tree in shapes.items():
        tree = jax.tree.map(template, tree, parts[name])
        read = ocp.load_checkpointables(folder, {name: tree})
        for leaf, equal in named_leaves(jax.tree.map(equal_bits, read, {name: parts[name]})):
            if not equal:
                raise ValueError(f"{leaf} is not read back as it was written")
