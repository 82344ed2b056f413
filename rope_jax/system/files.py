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
from collections.abc import Callable, Iterator
from typing import IO, Any

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

    Others (pipes, devices) may have no end, or make a reader wait forever.

    >>> with open_regular("/dev/zero") as file:
    ...     pass
    Traceback (most recent call last):
    ValueError: /dev/zero is not a regular file

    Args:
        path: of the file; links are followed.
        at_most: the largest size, in bytes; None for any.

    Raises:
        ValueError: it is something else, or larger.
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # before opening, which may wait or have effects
        raise ValueError(f"{os.fspath(path)} is not a regular file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if at_most is not None and size > at_most:
            raise ValueError(f"{os.fspath(path)} has {size:,} bytes; allowed are {at_most:,}")
        yield file


def read_regular(path: str | os.PathLike, *, at_most: int) -> bytes:
    """The content of a regular file of at most `at_most` bytes; errors as in `open_regular`."""
    with open_regular(path, at_most=at_most) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_json(path: str | os.PathLike) -> Any:
    """The value in a JSON file that may be damaged.

    Raises:
        ValueError: it is not a regular file, or not JSON.
        OSError: it cannot be read.
    """
    content = read_regular(path, at_most=_JSON_BYTES)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is not JSON: {error}") from error


def set_aside(path: pathlib.Path, why: object, suffix: str = "damaged") -> pathlib.Path:
    """Renames an unusable file to NAME.suffix (.2, ...), with a warning; returns the new path.

    Nothing is deleted: its owner may be able to repair the damage.
    """
    target, number = path.with_name(f"{path.name}.{suffix}"), 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}.{suffix}.{number}")
    path.rename(target)
    warn(f"WARNING: {why}. It is kept as {target.name}")
    return target


def file_sha256(path: str | os.PathLike) -> str:
    """The sha256 of a regular file's content, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: pathlib.Path, content: str | bytes) -> None:
    """Replaces a file atomically and syncs it to disk. Of several writers the last one wins.

    Raises:
        SaveFailed: it could not be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise SaveFailed(f"{path} could not be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def sync(path: pathlib.Path) -> None:
    """Syncs a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def lock(workdir: pathlib.Path) -> Iterator[Callable[[], bool]]:
    """Locks a workdir (created if missing) for this process.

    The operating system releases the lock when the process ends, however it ends, so locks are
    never stale.

    Yields:
        a function that checks whether the workdir still has this lock: False if it was deleted,
        moved or replaced.

    Raises:
        ValueError: another process holds it; the message names it.
        OSError: the workdir cannot be written to, or its file system has no locks.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / ".lock"
    with path.open("a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(1000).decode(errors="replace").strip() or "another process"
            raise ValueError(
                f"{workdir} is in use by {holder}: wait for it, or use another workdir"
            ) from None
        except OSError as error:  # ENOLCK
            raise OSError(
                f"{path} cannot be locked ({error.strerror}): use a workdir on a file system with "
                "locks, or mount this one with them"
            ) from error
        for leftover in workdir.glob(
            "*.[0-9]*.tmp"
        ):  # by a process that was killed in `write_file`
            leftover.unlink(missing_ok=True)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield functools.partial(_has_name, file, path)


def _has_name(file: IO[bytes], path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError as error:  # other errors leave it open; writing will fail, too
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
