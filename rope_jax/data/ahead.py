"""The next batch, made in a thread while one is in use."""

import atexit
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from threading import Thread

from rope_jax.data.workers import Batch
from rope_jax.files import warn

Waiting = Callable[[int], None]
_SAY_EVERY = 60  # seconds
_PATIENCE = 5.0  # seconds to wait for the end of a thread


class Ahead(Iterator[Batch]):
    """Takes the next batch from an iterator in a thread while one is in use."""

    def __init__(
        self,
        made: Iterator[Batch],
        about: str,
        waiting: Waiting,
        crew: Sequence[BaseProcess] = (),
    ):
        """Starts the thread.

        Args:
            made: the batches; only the thread uses it.
            about: what is read, for warnings.
            waiting: called once a second while a batch is awaited, with the seconds so far.
            crew: processes that make the batches, to be killed if they do not end.
        """
        self._about, self._waiting, self._crew = about, waiting, crew
        self._wanted: SimpleQueue = SimpleQueue()  # True for a batch, False to end
        self._ready: SimpleQueue = SimpleQueue()
        # Not a thread that the interpreter waits for: reading may hang with a file system.
        arguments = (made, self._wanted, self._ready)
        self._thread: Thread | None = Thread(
            target=_take, args=arguments, daemon=True, name="rope_jax.data"
        )
        self._thread.start()
        self._wanted.put(True)
        # Close before the interpreter shuts down.
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def __next__(self) -> Batch:
        if self._thread is None:
            raise StopIteration
        try:
            batch, error = self._awaited()
            if error is not None:
                raise error
        except Exception:  # after a signal the caller may have something to save before it closes
            self.close()
            raise
        self._wanted.put(True)
        return batch

    def _awaited(self) -> tuple[Batch | None, BaseException | None]:
        for seconds in itertools.count(1):
            try:
                return self._ready.get(timeout=1.0)
            except Empty:
                if seconds % _SAY_EVERY == 0:
                    warn(f"WARNING: {seconds} s without a batch: waiting for {self._source()}")
                self._waiting(seconds)

    def _source(self) -> str:
        workers = ", ".join(str(worker.pid) for worker in self._crew)
        return f"{self._about}, read by the processes {workers}" if workers else self._about

    def close(self) -> None:
        """Ends the thread and the iterator, after the current batch if that is ready soon."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._wanted.put(False)
        thread.join(_PATIENCE)
        if thread.is_alive():  # even stopped workers can be killed, which ends the thread
            for worker in self._crew:
                worker.kill()
            thread.join(_PATIENCE)
        atexit.unregister(self._at_exit)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self.close()


def _take(made: Iterator[Batch], wanted: SimpleQueue, ready: SimpleQueue) -> None:
    """The thread of `Ahead`: puts (batch, None), or (None, error) at the end."""
    while wanted.get():
        try:
            ready.put((next(made), None))
        except BaseException as error:
            ready.put((None, error))
    made.close()


def _close(reference: weakref.ref) -> None:
    if (iterator := reference()) is not None:
        iterator.close()
