"""Signals to a run: stop and save, or record a profile."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from rope_jax.system.sharding import MaximumOverProcesses

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_ALONE_AFTER = 10  # seconds that one of several processes still waits after a signal


class Interrupted(BaseException):
    """A signal stopped the run (Ctrl-C, SIGTERM, SIGUSR1, SIGHUP).

    It may be raised anywhere, like KeyboardInterrupt, and is not an `Exception`, which handlers
    could mistake for an error of the code that it interrupts.

    Attributes:
        saved: True if stopping loses nothing: a checkpoint exists.
        alone: True for one of several processes that could not save with the others.
    """

    saved = False
    alone = False


class Signals:
    """Pending requests from signals. A call raises Interrupted if a stop was requested.

    Several processes all stop at the same call, whichever of them received the signal.

    Attributes:
        at_once: True if a signal raises Interrupted immediately, because there is nothing to save.
    """

    def __init__(self) -> None:
        self.at_once = True
        self._stop: int | None = None
        self._since = 0.0  # time of the signal to stop
        self._profile = False
        self._maximum = MaximumOverProcesses()

    def __call__(self) -> None:
        if number := self._maximum(self._stop or 0):
            raise Interrupted(signal.Signals(number).name)

    def waiting(self, seconds: int) -> None:
        """Call once a second while this process waits for an event that may never occur.

        Args:
            seconds: for which it has waited so far.

        Raises:
            Interrupted: a stop was requested. Of several processes only this one is stopped, after
                a few seconds: the others wait for it, and end with it.
        """
        if self._stop is None:
            return
        if jax.process_count() == 1:
            self()
        if min(seconds, time.monotonic() - self._since) > _ALONE_AFTER:
            error = Interrupted(signal.Signals(self._stop).name)
            error.alone = True
            raise error

    def take_profile_request(self) -> bool:
        """Returns True if SIGUSR2 has arrived since the last call."""
        requested, self._profile = self._profile, False
        return requested

    def handle(self, number: int, frame: Any) -> None:
        """The signal handler. A second signal to stop is left to `_end_at_second`."""
        if number == signal.SIGUSR2:
            self._profile = True
        elif self._stop is None:
            self._stop, self._since = number, time.monotonic()
            if self.at_once and jax.process_count() == 1:
                self()
            with contextlib.suppress(OSError):  # a closed terminal; print may not be used here
                os.write(2, b"\nrope_jax: stopping after this step; once more to stop at once\n")

    def restore(self, number: int, handler: Any) -> None:
        """Restores the handler of a signal; a SIGHUP that stopped the run is ignored.

        A terminal that is closed sends it more than once.
        """
        closed = number == signal.SIGHUP == self._stop
        signal.signal(number, signal.SIG_IGN if closed else handler)


def _end_at_second(numbers: int) -> None:
    """Ends the process at the second signal to stop, except SIGHUP.

    A handler could not: Python calls none while the main thread compiles, or waits for a process.

    Args:
        numbers: descriptor from which the numbers of signals are read (`signal.set_wakeup_fd`).
    """
    stops = 0
    with open(numbers, "rb", buffering=0) as file:
        while received := file.read(1):
            if stops and received[0] in _STOP and received[0] != signal.SIGHUP:
                os._exit(128 + received[0])
            stops += received[0] in _STOP


@contextlib.contextmanager
def stop_signals() -> Iterator[Signals]:
    """Handles SIGINT, SIGTERM, SIGUSR1 and SIGHUP (stop) and SIGUSR2 (profile) in this context.

    A second signal to stop ends the process at once. SIGHUP stays ignored if it was (nohup).
    Outside the main thread nothing is handled.
    """
    signals = Signals()
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (*_STOP, signal.SIGUSR2):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    stack.callback(signals.restore, number, signal.signal(number, signals.handle))
            receiver, sender = os.pipe()
            os.set_blocking(sender, False)
            stack.callback(os.close, sender)
            stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(sender))
            threading.Thread(target=_end_at_second, args=(receiver,), daemon=True).start()
        yield signals
