"""The standard output and error of a process, which may be closed before it ends."""

import contextlib
import sys
from typing import Any


class _Unread:
    """A text stream that drops what it cannot write, after a terminal or a pipe was closed."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def keep_going_unread() -> None:
    """Keeps the standard output and error from stopping the process: what is lost is in files."""
    for name in ("stdout", "stderr"):
        if stream := getattr(sys, name):  # None, where the descriptor was closed before the start
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _Unread(stream))
