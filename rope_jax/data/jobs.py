"""Jobs over a whole image set in worker processes, for `prepare` and `verify`."""

import itertools
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from rope_jax.data.workers import DeadWorker


def run_jobs(function: Callable[..., Any], jobs: Iterable[tuple], *, workers: int) -> Iterator[Any]:
    """Yields the results of function(*job) as they become ready.

    Args:
        function: picklable, as are its arguments.
        jobs: arguments of each call.
        workers: number of processes; 0 to use this one.

    Raises:
        DeadWorker: a worker was killed.
    """
    if workers == 0:
        yield from itertools.starmap(function, jobs)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        # Only this process handles Ctrl-C: it waits for the current jobs and starts no others.
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        for future in as_completed([pool.submit(function, *job) for job in jobs]):
            yield future.result()
    except BrokenProcessPool as error:
        raise DeadWorker(
            "a worker process ended early, usually for lack of memory: use fewer with --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class ImageCounter:
    """Prints how many of `total` images are done, at most once a second and at the end."""

    def __init__(self, title: str, total: int):
        self._title, self._total, self._done = title, total, 0
        self._start, self._printed = time.monotonic(), 0.0

    def add(self, images: int) -> None:
        """Counts finished images."""
        self._done += images
        now = time.monotonic()
        if now - self._printed >= 1 or self._done == self._total:
            self._printed = now
            rate = self._done / max(now - self._start, 1e-9)
            minutes_left = (self._total - self._done) / rate / 60
            text = f"{self._title}: {self._done:,} of {self._total:,} images"
            print(f"{text}, {rate:,.0f} images/s, {minutes_left:.1f} minutes left", flush=True)
