"""Atomic writes, locks, hashes and the cache folder."""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import socket
import sys
from collections.abc import Callable, Iterator
from typing import IO


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


def file_sha256(path: str | os.PathLike) -> str:
    """The sha256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: pathlib.Path, content: str | bytes) -> None:
    """Replaces a file atomically and syncs it to disk.

    Raises:
        SaveFailed: it could not be written.
    """
    _replace(path, lambda: content)


def update_file(path: pathlib.Path, change: Callable[[str | None], str]) -> None:
    """Replaces the text of a file like `write_file`, one process at a time.

    Args:
        path: of the file.
        change: old text (None without a file) -> new text.

    Raises:
        SaveFailed: it could not be written.
    """
    _replace(path, lambda: change(path.read_text(errors="replace") if path.exists() else None))


def _replace(path: pathlib.Path, content_of: Callable[[], str | bytes]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
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
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Locks a workdir (created if missing) for this process.

    The operating system releases the lock when the process ends, however it ends, so locks are
    never stale. A workdir that was created here and is still empty is removed again.

    Raises:
        ValueError: another process holds it; the message names it.
        OSError: the workdir cannot be written to.
    """
    made = not workdir.exists()
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / ".lock"
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(locked_file(path, wait=False))
        except BlockingIOError:
            holder = path.read_text().strip() if path.exists() else ""
            raise ValueError(
                f"{workdir} is in use by {holder or 'another process'}: "
                "wait for it, or use another workdir"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        file.flush()
        try:
            yield
        finally:
            if made and [p.name for p in workdir.iterdir()] == [path.name]:
                path.unlink()
                workdir.rmdir()
