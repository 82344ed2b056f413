"""Examples made by worker processes, through grain.

The stream is cut into pieces, numbered from where it starts; worker k of w makes pieces k, k + w, ... A piece is a pure function of its
number, so neither the number of workers nor where a run was interrupted changes what comes out.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

import numpy as np
from absl import flags

Batch = dict[str, np.ndarray]

_PIECE = 32  # examples: small, so that the first batch comes soon and little waits in memory
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


class DeadWorker(RuntimeError):
    """A worker process ended before its time."""


class _Pieces:
    """What grain reads: piece number -> examples."""

    def __init__(self, make: Callable[[int, int], Batch], start: int, stop: int | None):
        self._make, self._start, self._stop = make, start, stop

    def __len__(self) -> int:
        return sys.maxsize if self._stop is None else -(-(self._stop - self._start) // _PIECE)

    def __getitem__(self, number: int) -> Batch:
        first = self._start + number * _PIECE
        return self._make(first, first + _PIECE)


def in_processes(make: Callable[[int, int], Batch], size: int, step: int, *, workers: int, stop: int | None) -> Iterator[Batch]:
    """Batches made by worker processes.

    Args:
        make: (start, stop) -> the examples of the stream from one number to another; is pickled.
        size: examples in a batch.
        step: the first one.
        workers: number of processes, at least 1. They ignore Ctrl-C, which is for the process that started them, and end with it.
        stop: number at which the stream ends; None for never. The last batch is as long as the others.

    Yields:
        arrays by name, of `size` examples each (`bad`: of any length).

    Raises:
        DeadWorker: a worker was killed or crashed.
        Exception: whatever `make` raises.
    """
    try:
        import grain
        import grain.experimental
    except ImportError as error:
        raise ValueError("data workers need grain: pip install 'rope_jax[data]', or set workers to 0") from error
    if not flags.FLAGS.is_parsed():  # grain reads flags, also in programs that have none
        flags.FLAGS.mark_as_parsed()

    start = step * size
    if stop is not None:
        stop = -(-stop // size) * size  # whole batches
    pieces = grain.MapDataset.source(_Pieces(make, start, stop)).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    # Images go through shared memory, labels with the message.
    pieces = grain.experimental.WithOptionsIterDataset(pieces, grain.experimental.DatasetOptions(min_shm_size=1 << 14))
    pieces = pieces.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2), worker_init_fn=_start_worker)
    before = set(multiprocessing.active_children())
    iterator = iter(pieces)
    try:
        with _shielded():
            piece, used = next(iterator), 0
        crew = {child.pid: child for child in set(multiprocessing.active_children()) - before}
        while True:
            parts, missing = [], size
            while missing:
                if used == len(piece["label"]):
                    piece, used = _next(iterator, crew), 0
                taken = min(missing, len(piece["label"]) - used)
                parts.append({name: array if name == "bad" else array[used : used + taken] for name, array in piece.items()})
                used, missing = used + taken, missing - taken
            yield {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            start += size
            if stop is not None and start >= stop:
                return
    finally:
        iterator.close()


def _next(iterator: Iterator[Batch], crew: dict[int, BaseProcess]) -> Batch:
    try:
        return next(iterator)
    except RuntimeError as error:
        if not (ended := {pid: child.exitcode for pid, child in crew.items() if child.exitcode is not None}):
            raise
        names = ", ".join(f"process {pid} ({_reason(code)})" for pid, code in ended.items())
        raise DeadWorker(
            f"a data worker ended before its time: {names}. Killed workers usually ran out of memory: use fewer, or smaller batches"
        ) from error


def _reason(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exit status {exitcode}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"killed by signal {-exitcode}"


@contextlib.contextmanager
def _shielded() -> Iterator[None]:
    """Processes started inside are born with the stop signals blocked: Ctrl-C must not end them while the parent saves."""
    multiprocessing.resource_tracker.ensure_running()  # it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(number: int, workers: int) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers, which would wait for ever."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
