"""Files that may be damaged or missing, atomic writes, locks, hashes and the cache folder."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
RETRY_AFTER = (0.5, 1.0, 2.0)  # seconds
_JSON_BYTES = 1 << 28  # of a JSON file; config, results and indices have far fewer


class SaveFailed(OSError):
    """A file could not be written; its previous content is untouched."""


def warn(message: str) -> None:
    """Prints one line to standard error."""
    print(f"rope_jax: {message}", file=sys.stderr, flush=True)


def cache_folder() -> pathlib.Path:
    """The cache folder: $ROPE_JAX_CACHE, else rope_jax in $XDG_CACHE_HOME or ~/.cache.

    Raises:
        RuntimeError: neither variable is set and the user has no home folder.
    """
    if chosen := os.environ.get("ROPE_JAX_CACHE"):
        return pathlib.Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(caches, "rope_jax")


@contextlib.contextmanager
def open_regular(path: str | os.PathLike, *, at_most: int | None = None) -> Iterator[IO[bytes]]:
    """Opens a file for reading, if it is a regular file of a limited size.

    Others (pipes, devices) may have no end, or make a reader wait for ever.

    >>> with open_regular("/dev/zero") as file:
    ...     pass
    Traceback (most recent call last):
    ValueError: /dev/zero is a device, not a regular file

    Args:
        path: of the file; links are followed.
        at_most: the largest size, in bytes; None for any.

    Raises:
        ValueError: it is something else, or larger.
        OSError: it cannot be read.
    """
    if kind := _not_regular(pathlib.Path(path)):  # before opening, which may wait or have effects
        raise ValueError(f"{os.fspath(path)} is {kind}, not a regular file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if at_most is not None and size > at_most:
            raise ValueError(f"{os.fspath(path)} has {size:,} bytes; allowed are {at_most:,}")
        yield file


def read_regular(path: str | os.PathLike, *, at_most: int) -> bytes:
    """The content of a regular file of at most `at_most` bytes; errors as in `open_regular`."""
    with open_regular(path, at_most=at_most) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def _not_regular(path: pathlib.Path) -> str | None:
    """What the path names in place of a regular file; None for one, and for nothing at all."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return "a loop of links"
    return next((kind for test, kind in _KINDS.items() if test(mode)), None)


def read_json(path: str | os.PathLike) -> Any:
    """The value in a JSON file that may be damaged.

    Raises:
        ValueError: it is no regular file, or not JSON.
        OSError: it cannot be read.
    """
    content = read_regular(path, at_most=_JSON_BYTES)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is not JSON: {error}") from error


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with the digest of its entries as another entry, `sha256`.

    >>> unsealed(sealed({"top1": 0.5}), "results.json")
    {'top1': 0.5}
    """
    return value | {"sha256": _digest(value)}


def unsealed(value: Any, name: str) -> dict[str, Any]:
    """The entries of an object of `sealed`, without the digest.

    Raises:
        ValueError: it is something else, or an entry was changed; the message has `name`.
    """
    if not isinstance(value, dict) or "sha256" not in value:
        raise ValueError(f"{name} has no digest of its entries")
    entries = {key: entry for key, entry in value.items() if key != "sha256"}
    if _digest(entries) != value["sha256"]:
        raise ValueError(f"{name} was changed after it was written: its digest is of other entries")
    return entries


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def set_aside(path: pathlib.Path, why: object) -> pathlib.Path:
    """Renames what cannot be used to NAME.damaged (.damaged.2, ...), with a warning; the new path.

    Nothing is deleted: the damage may be one that its owner can repair.
    """
    target, number = path.with_name(f"{path.name}.damaged"), 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}.damaged.{number}")
    path.rename(target)
    warn(f"WARNING: {why}. It is kept as {target.name}")
    return target


def make_folder(path: pathlib.Path) -> pathlib.Path:
    """Creates a folder, unless it exists; a file of that name is set aside. Returns the path."""
    if os.path.lexists(path) and not path.is_dir():
        set_aside(path, f"{path} is no folder")
    path.mkdir(parents=True, exist_ok=True)
    return path


def file_sha256(path: str | os.PathLike) -> str:
    """The sha256 of a regular file's content, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_sha256(path: pathlib.Path, sha256: str) -> bool:
    """Whether a regular file has this sha256, in hexadecimal."""
    return file_sha256(path) == sha256


def retried(read: Callable[[], Any], pauses: Sequence[float]) -> Any:
    """The result of `read`, which is called again, after each of the pauses (s), if it fails.

    >>> retried(lambda: 3, RETRY_AFTER)
    3

    Raises:
        OSError: the last call failed, too.
    """
    for pause in pauses:
        with contextlib.suppress(OSError):
            return read()
        time.sleep(pause)
    return read()


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Adds a path to each OSError in the context that names none (as a full disk's)."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # of NumPy, for a file that it could not write as a whole
            raise OSError(f"{os.fspath(path)}: {error}") from error
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_file(path: pathlib.Path, content: str | bytes) -> None:
    """Replaces a file atomically and syncs it to disk; a folder or pipe of that name is set aside.

    Raises:
        SaveFailed: it could not be written.
    """
    _replace(path, lambda: content)


def update_file(path: pathlib.Path, change: Callable[[], str]) -> None:
    """Replaces a file like `write_file`, by `change()`, which may read it: one process at a time.

    Raises:
        SaveFailed: it could not be written.
    """
    _replace(path, change)


def _replace(path: pathlib.Path, content_of: Callable[[], str | bytes]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        for place in (path, temporary):
            if kind := _not_regular(place):
                set_aside(place, f"{place} is {kind}, not a regular file")
        with locked_file(temporary, wait=True) as file:
            try:
                content = content_of()
                file.truncate(0)  # a killed process may have left partial content
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            temporary.replace(path)
            sync_folder(path.parent)
    except OSError as error:
        raise SaveFailed(f"{path} could not be written: {error.strerror}") from error


def sync_folder(path: pathlib.Path) -> None:
    """Syncs a folder's directory entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_file(path: pathlib.Path, *, wait: bool) -> Iterator[IO[bytes]]:
    """Opens a file (created if missing) and locks it against other processes.

    Raises:
        BlockingIOError: another process holds it, and `wait` is False.
    """
    while True:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _has_name(file, path):  # otherwise its last holder removed or renamed it
                yield file
                return


def _has_name(file: IO[bytes], path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[Callable[[], bool]]:
    """Locks a workdir (created if missing) for this process.

    The operating system releases the lock when the process ends, however it ends, so locks are
    never stale. A workdir that was created here and is still empty is removed again.

    Yields:
        a function: whether the workdir still has this lock, so was not deleted, moved or replaced.

    Raises:
        ValueError: another process holds it; the message names it.
        OSError: the workdir cannot be written to.
    """
    made = not workdir.exists()
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / ".lock"
    with contextlib.ExitStack() as stack:
        if kind := _not_regular(path):
            raise ValueError(f"{path}, the lock of the workdir, is {kind}: remove it")
        try:
            file = stack.enter_context(locked_file(path, wait=False))
        except BlockingIOError:
            holder = ""
            with contextlib.suppress(FileNotFoundError, ValueError):
                holder = read_regular(path, at_most=1000).decode(errors="replace").strip()
            raise ValueError(
                f"{workdir} is in use by {holder or 'another process'}: "
                "wait for it, or use another workdir"
            ) from None
        with naming(path):
            file.truncate(0)
            # Not buffered: closing the file would write what is left, and fail without a name.
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        still_ours = functools.partial(_has_name, file, path)
        try:
            yield still_ours
        finally:
            with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                if made and still_ours() and [p.name for p in workdir.iterdir()] == [path.name]:
                    path.unlink()
                    workdir.rmdir()
