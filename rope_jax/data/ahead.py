"""Prefetching: the next batch is made in a thread while one is in use."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from multiprocessing.process import BaseProcess
from threading import Thread

from rope_jax.data.workers import Batch
from rope_jax.system.files import warn

Waiting = Callable[[int], None]
_WARN_EVERY = 60  # seconds
_PATIENCE = 5.0  # seconds to wait for an end


class Ahead(Iterator[Batch]):
    """Takes the next batch from an iterator in a thread while one is in use."""

    def __init__(
        self,
        batches: Iterator[Batch],
        source_name: str,
        waiting: Waiting,
        crew: Sequence[BaseProcess] = (),
    ):
        """Starts with the first batch.

        Args:
            batches: the batches, of a generator.
            source_name: name of the source, for warnings.
            waiting: called once a second while a batch is awaited, with the seconds so far.
            crew: processes that make the batches, to be killed if they do not end.
        """
        self._batches, self._source_name = batches, source_name
        self._waiting, self._crew = waiting, crew
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._next: Future[Batch] = Future()
        # Daemons: a program must be able to end while a file system does not respond.
        Thread(target=_take, args=(self._batches, self._next), daemon=True).start()

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        for seconds in itertools.count(1):
            if wait([self._next], timeout=1.0).done:
                break
            if seconds % _WARN_EVERY == 0:
                warn(f"WARNING: {seconds} s without a batch: waiting for {self._source_name}")
            self._waiting(seconds)
        batch = self._next.result()
        self._start()
        return batch

    def close(self) -> None:
        """Ends the iterator after the current batch, if that is ready soon."""
        self._closed = True
        closing = Thread(target=_close, args=(self._batches, self._next), daemon=True)
        closing.start()
        closing.join(_PATIENCE)
        if closing.is_alive():  # even stopped workers can be killed, which ends their batch
            for worker in self._crew:
                worker.kill()
            closing.join(_PATIENCE)


def _take(batches: Iterator[Batch], future: Future[Batch]) -> None:
    try:
        future.set_result(next(batches))
    except BaseException as error:  # raised where the batch is awaited
        future.set_exception(error)


def _close(batches: Iterator[Batch], future: Future[Batch]) -> None:
    wait([future])
    batches.close()
