"""The folder of a run: held by one process at a time, with files that are there whole or not at all."""

import contextlib
import fcntl
import os
import pathlib
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TextIO


class SaveFailed(OSError):
    """Something could not be written into the workdir; what was there before is untouched."""


def warn(message: str) -> None:
    """One line on the standard error output."""
    print(f"rope_jax: {message}", file=sys.stderr, flush=True)


def write_file(path: pathlib.Path, text: str) -> None:
    """Writes a text file, whole or not at all, and on the disk when it returns.

    Raises:
        SaveFailed: it could not be written.
    """
    update_file(path, lambda _: text)


def update_file(path: pathlib.Path, change: Callable[[str | None], str]) -> None:
    """Replaces the text of a file by another, as `write_file` does. Whoever else does so to the same file waits for its turn.

    Args:
        path: of the file.
        change: what to write, given what is there; None is given where there is no file.

    Raises:
        SaveFailed: it could not be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with _held(temporary, wait=True) as file:
            try:
                text = change(path.read_text(errors="replace") if path.exists() else None)
                file.truncate(0)  # whoever was killed in here has left a part
                file.write(text)
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
    """Forces the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Holds a workdir (made when it is not there) for this process alone.

    The system drops the lock when the process ends, however it ends: no lock is ever stale. A workdir that was made here and has stayed
    empty is removed again.

    Raises:
        ValueError: another process holds it; the message names it.
        OSError: the workdir cannot be written to.
    """
    made = not workdir.exists()
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / ".lock"
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(_held(path, wait=False))
        except BlockingIOError:
            holder = path.read_text().strip() if path.exists() else ""
            raise ValueError(f"{workdir} is in use by {holder or 'another process'}: wait for it, or use another workdir") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            if made and [p.name for p in workdir.iterdir()] == [path.name]:
                path.unlink()
                workdir.rmdir()


@contextlib.contextmanager
def _held(path: pathlib.Path, *, wait: bool) -> Iterator[TextIO]:
    """A file that is open for this process alone, made when it is not there; BlockingIOError where it is not ours and we do not wait."""
    while True:
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _has_name(file, path):  # else whoever held it has removed or renamed it: once more, with the file of that name
                yield file
                return


def _has_name(file: TextIO, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
