"""Jobs over a whole image set in worker processes, for the programs of this package."""

import argparse
import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from rope_jax.data.sources import SPLITS, STREAMED
from rope_jax.data.workers import DeadWorker


def in_pool(function: Callable[..., Any], jobs: Iterable[tuple], *, workers: int) -> Iterator[Any]:
    """Results of function(*job) in the order in which they are ready.

    Args:
        function: of a module, so that it can be pickled, like its arguments.
        jobs: arguments of each call.
        workers: processes; 0 for this one.

    Raises:
        DeadWorker: a worker was killed.
    """
    if workers == 0:
        yield from (function(*job) for job in jobs)
        return
    # Ctrl-C is for this process: it waits for the jobs under way and starts no others.
    ignore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=ignore)
    try:
        for future in as_completed([pool.submit(function, *job) for job in jobs]):
            yield future.result()
    except BrokenProcessPool as error:
        raise DeadWorker("a worker process ended before its time, usually for lack of memory: use fewer with --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what says which images and how many processes."""
    parser.add_argument("--source", required=True, choices=STREAMED, help="what the images are in, see rope_jax.data.load")
    parser.add_argument("--path", required=True, help="where they lie")
    parser.add_argument("--splits", default=",".join(SPLITS), help="of train and test, joined by a comma (default: both)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--workers", type=int, default=cores, help="processes; 0 for none beside this one (default: one a core)")


class Progress:
    """Prints how far a job over `total` images has come, at most once a second and at the end."""

    def __init__(self, what: str, total: int):
        self._what, self._total, self._done, self._start, self._told = what, total, 0, time.monotonic(), 0.0

    def add(self, images: int) -> None:
        """So many more are done."""
        self._done += images
        now = time.monotonic()
        if now - self._told < 1 and self._done < self._total:
            return
        self._told = now
        rate = self._done / max(now - self._start, 1e-9)
        left = f", {(self._total - self._done) / rate / 60:.1f} minutes left" if self._done < self._total else ""
        print(f"{self._what}: {self._done:,} of {self._total:,} images, {rate:,.0f} images/s{left}", flush=True)
