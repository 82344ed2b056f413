"""Silences what libraries print of a failed save or read, which becomes one error message."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

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
