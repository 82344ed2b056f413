"""The standard output and error of a process, which may be closed before it ends."""

import contextlib
import sys
from typing import Any


class _Unread:
    """A text stream that drops what it cannot write because of some kind of error."""

    def __init__(self, stream: Any, error: type[OSError]):
        self._stream, self._error = stream, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(self._error):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(self._error):
            self._stream.flush()


def keep_going_unread(error: type[OSError] = BrokenPipeError) -> None:
    """Keeps a closed standard output or error from stopping the process.

    Args:
        error: OSError for a process whose output is also in files, so that a full disk or a closed
            terminal does not stop it, either.
    """
    for name in ("stdout", "stderr"):
        if stream := getattr(sys, name):  # None, where the descriptor was closed before the start
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _Unread(stream, error))
