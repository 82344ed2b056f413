"""Signals to a run: stop and save, or record a profile."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax

from rope_jax.sharding import MaximumOverProcesses


class Interrupted(Exception):
    """A signal stopped the run (Ctrl-C, SIGTERM, SIGUSR1).

    Attributes:
        saved: whether a checkpoint holds the latest state.
    """

    saved = False


class Signals:
    """Pending requests from signals. A call raises Interrupted if a stop was requested.

    Several processes all stop at the same call, whichever of them received the signal.

    Attributes:
        at_once: whether a signal raises Interrupted immediately, as there is nothing to save.
        saved: whether the workdir holds a checkpoint.
    """

    def __init__(self) -> None:
        self.at_once, self.saved = True, False
        self._stop: int | None = None
        self._profile = False
        self._maximum = MaximumOverProcesses()

    def __call__(self) -> None:
        if number := self._maximum(self._stop or 0):
            raise Interrupted(signal.Signals(number).name)

    def profile_wanted(self) -> bool:
        """Whether SIGUSR2 has arrived since the last call."""
        wanted, self._profile = self._profile, False
        return wanted

    def handle(self, number: int, frame: Any) -> None:
        """The signal handler."""
        if number == signal.SIGUSR2:
            self._profile = True
        elif self._stop is not None:
            os.write(2, b"\nrope_jax: stopped at once\n")  # print may not be used here
            os._exit(128 + number)
        else:
            self._stop = number
            if self.at_once and jax.process_count() == 1:
                self()
            os.write(
                2,
                b"\nrope_jax: stopping after this step; once more to stop at once, without "
                b"saving\n",
            )


@contextlib.contextmanager
def stop_signals() -> Iterator[Signals]:
    """Handles SIGINT, SIGTERM and SIGUSR1 (stop) and SIGUSR2 (profile) in this context.

    A second signal to stop ends the process at once. Outside the main thread nothing is handled.
    """
    signals, previous = Signals(), {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            previous[number] = signal.signal(number, signals.handle)
    try:
        yield signals
    except Interrupted as error:
        error.saved = signals.saved
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
