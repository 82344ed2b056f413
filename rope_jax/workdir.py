"""The folder of a run: held by one process at a time, with files that are there whole or not at all."""

import contextlib
import fcntl
import os
import pathlib
import socket
import sys
from collections.abc import Iterator


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
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
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
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            raise ValueError(f"{workdir} is in use by {holder or 'another process'}: wait for it, or use another workdir") from None
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()  # whoever held it has just removed it
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    try:
        yield
    finally:
        if made and [p.name for p in workdir.iterdir()] == [path.name]:
            path.unlink()
            workdir.rmdir()
        file.close()
