"""Examples created by worker processes, through grain.

Batches are cut into numbered pieces; worker k of w creates pieces k, k + w, ... A piece is a pure
function of its number, so that the stream depends neither on the number of workers nor on
interruptions.
"""

import contextlib
import functools
import itertools
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

from rope_jax.names import plugins

Batch = dict[str, np.ndarray]

# Examples at most; few, so that the first batch is ready soon and few are held in memory.
_PIECE = 32
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


class DeadWorker(RuntimeError):
    """A worker process ended prematurely."""


class _Pieces:
    """A map from piece number to examples, as a source for grain.

    Batches are cut into equal numbers of pieces, so that no piece spans two of them: images of
    different batches may have different sizes.
    """

    def __init__(self, make: Callable[[int, int, int], Batch], size: int, steps: range):
        self.per_batch = -(-size // _PIECE)
        self._make, self._size, self._steps = make, size, steps

    def __len__(self) -> int:
        return min(len(self._steps) * self.per_batch, sys.maxsize)

    def __getitem__(self, number: int) -> Batch:
        batch, part = divmod(number, self.per_batch)
        start, stop = (k * self._size // self.per_batch for k in (part, part + 1))
        return self._make(self._steps[batch], start, stop)


def in_processes(
    make: Callable[[int, int, int], Batch],
    size: int,
    steps: range,
    workers: int,
    crew: list[BaseProcess],
) -> Iterator[Batch]:
    """Batches created by worker processes.

    Args:
        make: (step, start, stop) -> examples `start` to `stop` of the batch of a step; picklable.
        size: examples in a batch.
        steps: of the batches.
        workers: number of processes, at least 1. They ignore Ctrl-C and the other signals
            that the parent process handles, and end with that process.
        crew: the processes are added to this list when they have started.

    Yields:
        arrays by name, of `size` examples each (`bad`: of any length).

    Raises:
        DeadWorker: a worker was killed or crashed.
        Exception: any that `make` raises.
    """
    try:
        import grain
        import grain.experimental
    except ImportError as error:
        raise ValueError(
            "data workers need grain: pip install 'rope_jax[data]', or set workers to 0"
        ) from error
    if not flags.FLAGS.is_parsed():  # grain reads absl flags, even in programs without any
        flags.FLAGS.mark_as_parsed()

    source = _Pieces(make, size, steps)
    pieces = grain.MapDataset.source(source)
    pieces = pieces.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    # Images are sent through shared memory, labels with the message.
    options = grain.experimental.DatasetOptions(min_shm_size=1 << 14)
    pieces = grain.experimental.WithOptionsIterDataset(pieces, options)
    processes = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
    start = functools.partial(_start_worker, plugins.find_needed(""))
    iterator = iter(pieces.mp_prefetch(processes, worker_init_fn=start))
    before = set(multiprocessing.active_children())
    try:
        with _block_signals():
            results = itertools.chain([next(iterator)], iterator)
        crew += set(multiprocessing.active_children()) - before
        for parts in itertools.batched(results, source.per_batch):
            yield {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    except RuntimeError as error:  # of grain, with the exit code
        raise DeadWorker(
            f"a data worker ended early ({error}): killed workers usually ran out of "
            "memory, so use fewer, or smaller batches"
        ) from error
    finally:
        iterator.close()


@contextlib.contextmanager
def _block_signals() -> Iterator[None]:
    """Starts processes with the stop signals blocked: Ctrl-C must not end them during a save."""
    multiprocessing.resource_tracker.ensure_running()  # which would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(names: tuple[str, ...], number: int, workers: int) -> None:
    """Loads the plug-ins that were requested by name; others are loaded when needed."""
    for stop_signal in _SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=end_with_parent, daemon=True).start()
    plugins.load(names)


def end_with_parent() -> None:
    """Ends this process together with its parent, even if the parent is killed."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
