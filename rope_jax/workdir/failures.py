"""Failed saves and reads: one sentence each, in place of what orbax and tensorstore report."""

import contextlib
import errno
import logging
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

TOO_FEW = (
    "the files match their hashes, but reading them failed; the usual causes are too few file "
    "handles (ulimit -n) or too little memory"
)
_TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)  # worth a retry
_LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES)
# What orbax logs of an error that it raises, too; and asyncio, of loops that were cut short by it.
_REPEATED = (
    "_SignalingThread.run() raised an exception",
    "Failed to get metadata for checkpointable",
    "deallocating an open event loop",
)


def _is_news(record: logging.LogRecord) -> bool:
    return not any(words in str(record.msg) for words in _REPEATED)


@contextlib.contextmanager
def quiet_failures() -> Iterator[None]:
    """Keeps orbax, asyncio and tensorstore from printing errors that are also raised."""
    hook = sys.unraisablehook

    def unraisablehook(unraisable: Any) -> None:
        # tensorstore reports writes that end after orbax has given up.
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    for logger in loggers:
        logger.addFilter(_is_news)
    sys.unraisablehook = unraisablehook
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for logger in loggers:
            logger.removeFilter(_is_news)


@contextlib.contextmanager
def reading(folder: pathlib.Path) -> Iterator[None]:
    """Turns any error of orbax and tensorstore, for files that verify, into one of reading."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{folder} could not be read ({_first_line(error)}): {TOO_FEW}") from error


def is_transient(error: BaseException | None) -> bool:
    """Whether a retry may succeed. Orbax passes on errors of file systems as codes or as text."""
    words = [os.strerror(code) for code in _TRANSIENT]
    while error is not None:
        if getattr(error, "errno", None) in _TRANSIENT or any(word in str(error) for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def reason_of(error: BaseException) -> str:
    """Why a save failed, in a few words: the file system's, where an error has them."""
    words = [os.strerror(code) for code in (*_LASTING, *_TRANSIENT)]
    return next((word for word in words if word in str(error)), _first_line(error))


def _first_line(error: BaseException) -> str:
    # Messages of tensorstore have 500 characters.
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def free_space(folder: pathlib.Path) -> str:
    """What is free on the disk of a folder, to be put into a sentence."""
    try:
        return f"{human_size(shutil.disk_usage(folder).free)} are free"
    except OSError:
        return "and that folder cannot be reached"


def human_size(size: int) -> str:
    """A number of bytes.

    >>> human_size(2_500_000)
    '2.5 MB (2,500,000 bytes)'
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit} ({size:,} bytes)"
    return f"{size} bytes"
