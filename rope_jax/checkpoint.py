"""Trees of arrays on disk: one folder per step, there whole or not at all, with a hash of every file.

A save copies the arrays and returns; a thread writes them to `<step>.writing/`, reads back and hashes every file, writes the hashes to
`manifest.json`, forces all of it to the disk, and only then renames the folder to `<step>/`. What was reported as saved is therefore there
after any crash. A step counts only if its files are those of its manifest, bit for bit.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from rope_jax.workdir import SaveFailed, sync_folder, warn, write_file

_MANIFEST = "manifest.json"
_STEP = re.compile(r"0|[1-9]\d*")
_UNFINISHED = re.compile(r"\d+\.(writing|deleting)(\..*)?")  # what a crash leaves behind: of these names, and no others, we delete
_RETRY_AFTER = (0.5, 1.0, 2.0)  # seconds
_TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)  # may be over a second later
_LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES)  # no use to try again
_SPARE = 1.2  # free space to have, in sizes of the next checkpoint


class Damaged(ValueError):
    """A checkpoint is not what was written."""


class Checkpoints:
    """The checkpoints of one run, in `folder/<step>/`; a context manager, whose end waits for the last save.

    A state is a dict of trees; each of its entries is a folder of its own and can be read alone. With several processes all of them call
    every method; the first one looks at the disk and decides.

    Attributes:
        on_saved: called with (step, bytes, seconds), from the thread that writes, when a step is on disk for good.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int | None = None):
        """Opens a folder of checkpoints (made when it is not there); the newest `keep` that verify stay, or all."""
        self._folder, self._keep = folder.absolute(), keep
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rope_jax.checkpoint")
        self._pending: concurrent.futures.Future | None = None
        self.on_saved: Callable[[int, int, float], None] = lambda step, size, seconds: None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, exception: Any, traceback: Any) -> None:
        try:
            self.wait()
        except SaveFailed as error:
            if exception is None:
                raise
            warn(str(error))  # what ended the run first is told by itself
        finally:
            self._thread.shutdown()

    def steps(self) -> list[int]:
        """The steps that are there, ascending, whether they verify or not."""
        if not self._folder.is_dir():
            return []
        with os.scandir(self._folder) as entries:
            return sorted(int(e.name) for e in entries if _STEP.fullmatch(e.name) and e.is_dir(follow_symlinks=False))

    def newest(self) -> int | None:
        """The newest step that is there, or None. Waits for a save that is under way, however it ends."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])
        return max(self.steps(), default=None)

    def newest_verified(self, *, strict: bool = False, rename: bool = False) -> int | None:
        """The newest step whose files are those that were written; None where there never was one.

        Args:
            strict: stop at a damaged step instead of going back to the one before it.
            rename: damaged steps become `<step>.corrupt`, so that they are in nobody's way; nothing of them is deleted.

        Raises:
            Damaged: there are checkpoints and none verifies; or `strict`, and the newest one does not.
        """
        return _decided(lambda: self._newest_verified(strict, rename))

    def _newest_verified(self, strict: bool, rename: bool) -> int | None:
        bad = []
        for step in reversed(self.steps()):
            problem = self.problem(step)
            if problem is None:
                return step
            told = f"checkpoint {self._folder / str(step)} is damaged: {problem}"
            if strict:
                raise Damaged(f"{told}; without --strict_restore the newest one that verifies is taken")
            bad.append((self._set_aside(step) if rename else self._folder / str(step)).name)
            warn(f"WARNING: {told}; looking for an older one" + (f". It is kept as {bad[-1]}" if rename else ""))
        bad += [path.name for path in self._folder.glob("*.corrupt*") if path.name not in bad] if self._folder.is_dir() else []
        if bad:
            raise Damaged(
                f"no checkpoint in {self._folder} verifies ({', '.join(sorted(bad))}): repair one, or move that folder away to start anew"
            )
        return None

    def problem(self, step: int) -> str | None:
        """What is wrong with the files of a step, in a few words; None when they are those that were written."""
        folder = self._folder / str(step)
        try:
            found = dict(_files(folder))  # first of all, so that only plain files are ever opened
            if _MANIFEST not in found:
                return f"{_MANIFEST} is missing"
            text = found.pop(_MANIFEST).read_text()
            expected = json.loads(text)
            if text != _manifest(step, expected["files"]):  # so that no bit of the manifest itself can change unseen
                return f"{_MANIFEST} is not what was written"
            expected = expected["files"]
            different = sorted(expected.keys() ^ found.keys())
            if different:
                return f"{different[0]} {'is missing' if different[0] in expected else 'does not belong to it'}"
            for name, path in found.items():
                if path.stat().st_size != expected[name]["bytes"]:
                    return f"{name} has {path.stat().st_size} bytes, not {expected[name]['bytes']}"
                if _sha256(path) != expected[name]["sha256"]:
                    return f"the bytes of {name} are not those that were written"
        except FileNotFoundError as error:
            return f"{pathlib.Path(error.filename or '').name} is missing"
        except (OSError, Damaged) as error:
            return str(error)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return f"{_MANIFEST} is not readable"
        return None

    def clean(self) -> None:
        """Deletes what saves and deletions that were cut off have left: for the one process that holds the workdir's lock."""
        if jax.process_index() == 0:
            with os.scandir(self._folder) as entries:
                left = [e.path for e in entries if _UNFINISHED.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
            for path in left:
                shutil.rmtree(path)

    def save(self, step: int, state: dict[str, Any], *, about: dict) -> None:
        """Starts to write a state and, as JSON, what is to be known about it. A step that is there already stays.

        The arrays may be donated as soon as this returns. Waits for the save before it.

        Raises:
            ValueError: a number is not finite; nothing is written.
            SaveFailed: the save before this one did not arrive.
        """
        self.wait()
        if _decided(lambda: int(step in self.steps())):
            return
        bad = not_finite(state)
        if bad:
            raise ValueError(f"step {step} is not saved: {', '.join(bad[:3])} {'is' if len(bad) == 1 else 'are'} not finite")
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        path = self._folder / f"{step}.writing"
        begin = lambda state: ocp.save_checkpointables_async(path, state, custom_metadata=about)
        begun = None
        if jax.process_count() == 1:
            state = jax.device_get(state)  # so that a failed write can be repeated
            if jax.default_backend() == "cpu":
                state = jax.tree.map(np.copy, state)  # there they are views of what the next step overwrites
        else:
            begun = begin(state)  # every process writes its own part; orbax copies it before it returns
        self._pending = self._thread.submit(self._write, step, size, lambda: (begun or begin(state)).result())

    def wait(self) -> None:
        """Returns when what `save` began is on disk.

        Raises:
            SaveFailed: it could not be written.
        """
        if self._pending is None:
            return
        error, self._pending = self._pending.exception(), None
        failed = error is not None
        if jax.process_count() > 1:
            failed = bool(multihost_utils.process_allgather(np.array(failed)).any())
        if failed:
            raise error or SaveFailed("another process could not write its part of a checkpoint; see its message")

    def _write(self, step: int, size: int, arrays: Callable[[], None]) -> None:
        """What the thread does: everything between the arrays in memory and a step that counts."""
        begun = time.monotonic()
        for pause in (*_RETRY_AFTER, None):
            try:
                if not self._folder.is_dir():
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._folder))
                if jax.process_count() == 1:
                    shutil.rmtree(self._folder / f"{step}.writing", ignore_errors=True)
                arrays()
                if jax.process_index() == 0:
                    self._seal(step)
                break
            except Exception as error:  # orbax and tensorstore raise what they like
                if pause is not None and jax.process_count() == 1 and _is_transient(error):
                    time.sleep(pause)
                    continue
                lines = (str(error).strip() or type(error).__name__).splitlines()
                words = [os.strerror(code) for code in (*_LASTING, *_TRANSIENT)]
                reason = next((word for word in words if word in str(error)), lines[0][:300])  # tensorstore needs 500 letters to say it
                raise SaveFailed(
                    f"step {step} could not be saved in {self._folder}: {reason}. It needs {_human(size)}, {_free(self._folder)}; "
                    f"older checkpoints are untouched, and the same command goes on from the newest one"
                ) from error
        if jax.process_index() == 0:
            self.on_saved(step, size, time.monotonic() - begun)
            try:
                self._prune()
            except OSError as error:
                warn(f"WARNING: step {step} is saved, but older checkpoints could not be removed: {error}")
            with contextlib.suppress(OSError):
                if shutil.disk_usage(self._folder).free < _SPARE * size:
                    warn(f"WARNING: the next checkpoint may not fit into {self._folder}: it needs {_human(size)}, {_free(self._folder)}")

    def _seal(self, step: int) -> None:
        """Hashes what was written, forces it to the disk, and gives it its name."""
        folder = self._folder / f"{step}.writing"
        files = {}
        for name, path in sorted(_files(folder)):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                files[name] = {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        write_file(folder / _MANIFEST, _manifest(step, files))
        for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
            sync_folder(path)
        if os.path.lexists(self._folder / str(step)):
            self._set_aside(step)
        folder.rename(self._folder / str(step))
        sync_folder(self._folder)

    def _prune(self) -> None:
        """Deletes what is older than the newest `keep` steps that verify."""
        if self._keep is None:
            return
        kept = 0
        for step in reversed(self.steps()):
            if kept == self._keep:
                doomed = self._folder / f"{step}.deleting"
                shutil.rmtree(doomed, ignore_errors=True)
                (self._folder / str(step)).rename(doomed)  # at once, so that half of a step is never taken for one
                shutil.rmtree(doomed, ignore_errors=True)
            elif (problem := self.problem(step)) is None:
                kept += 1
            else:
                warn(f"WARNING: checkpoint {self._folder / str(step)} is damaged: {problem}. It is kept as {self._set_aside(step).name}")

    def _set_aside(self, step: int) -> pathlib.Path:
        """Renames a damaged step to `<step>.corrupt`, or `.corrupt.2` where there is one."""
        number, target = 1, self._folder / f"{step}.corrupt"
        while os.path.lexists(target):
            number += 1
            target = self._folder / f"{step}.corrupt.{number}"
        (self._folder / str(step)).rename(target)
        return target

    def load(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """Reads a state, or the entries of it that `like` has.

        Args:
            step: one that verifies.
            like: trees of `jax.ShapeDtypeStruct`s with the shardings to restore to.

        Raises:
            ValueError: what is on disk has other names, shapes or dtypes.
        """
        found = self._metadata(step).metadata
        check_tree(like, {name: found[name] for name in like if name in found})
        return ocp.load_checkpointables(self._folder / str(step), like)

    def about(self, step: int) -> dict:
        """What was stored beside a state.

        Raises:
            ValueError: it is not there: the checkpoint is damaged.
        """
        about = self._metadata(step).custom_metadata
        if not about:
            raise Damaged(f"checkpoint {self._folder / str(step)} is damaged: its metadata is missing; remove that folder")
        return about

    def _metadata(self, step: int) -> Any:
        return ocp.checkpointables_metadata(self._folder / str(step))


def _decided(choose: Callable[[], int | None]) -> int | None:
    """What the first process chooses, in all processes."""
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
        raise error or Damaged("the first process found no checkpoint that can be used; see its message")
    return None if code == nothing else code


def _manifest(step: int, files: dict[str, dict]) -> str:
    return json.dumps({"format": 1, "step": step, "files": files}, indent=1, sort_keys=True) + "\n"


def _files(folder: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """All files below a folder with their names in it; refuses links, and everything that is neither a file nor a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                for name, path in _files(pathlib.Path(entry.path)):
                    yield f"{entry.name}/{name}", path
            elif entry.is_file(follow_symlinks=False):
                yield entry.name, pathlib.Path(entry.path)
            else:
                raise Damaged(f"{entry.name} is {'a symbolic link' if entry.is_symlink() else 'not a plain file'}")


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_transient(error: BaseException | None) -> bool:
    """Whether the same write may succeed a second later. Such errors of file systems reach us as codes or, through orbax, as text."""
    words = [os.strerror(code) for code in _TRANSIENT]
    while error is not None:
        if getattr(error, "errno", None) in _TRANSIENT or any(word in str(error) for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def _free(folder: pathlib.Path) -> str:
    try:
        return f"{_human(shutil.disk_usage(folder).free)} are free"
    except OSError:
        return "and that folder cannot be reached"


def _human(size: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit} ({size:,} bytes)"
    return f"{size} bytes"


def not_finite(tree: Any) -> list[str]:
    """Names of the leaves that hold a number that is not finite; looked at where they lie."""
    leaves = [(name, leaf) for name, leaf in named_leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    finite = jax.device_get(_all_finite([leaf for _, leaf in leaves])) if leaves else []
    return [name for (name, _), fine in zip(leaves, finite, strict=True) if not fine]


@jax.jit
def _all_finite(leaves: list) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])


def check_tree(wanted: Any, found: Any) -> None:
    """Refuses a stored tree whose names, shapes or dtypes are not the wanted ones (orbax would cast a dtype without a word)."""
    wanted, found = dict(named_leaves(wanted)), dict(named_leaves(found))
    describe = lambda leaf: f"{leaf.dtype}{list(leaf.shape)}"
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not expected" for name in found if name not in wanted]
    both = [(name, describe(found[name]), describe(wanted[name])) for name in wanted if name in found]
    problems += [f"{name} is {there}, not {here}" for name, there, here in both if there != here]
    if problems:
        raise ValueError("the checkpoint does not fit this run: " + some_of(problems))


def some_of(problems: list[str]) -> str:
    """The first five of a list of problems, and how many more there are."""
    return "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with their names, "params.blocks.0.attn.qkv.kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def tree_hash(tree: Any) -> str:
    """sha256 over names, dtypes, shapes and bytes of all leaves: equal exactly when the trees are equal bit for bit."""
    digest = hashlib.sha256()
    for name, leaf in named_leaves(tree):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
