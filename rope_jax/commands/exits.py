"""The end of a command that trains: one-line errors, exit statuses."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator

import jax

from rope_jax.config import ConfigError
from rope_jax.data import BadImages, BadSet
from rope_jax.data.workers import DeadWorker
from rope_jax.names.text import other_command
from rope_jax.system.files import SaveFailed
from rope_jax.training.checkpoint import NonFinite
from rope_jax.training.signals import Interrupted

_LESS_MEMORY = "use a smaller --config.batch_size (or more --config.accumulate), model or image"
# Seconds. When the first of several processes ends, jax aborts the others, which may still have an
# error to print.
_LAST_WORDS = 2


# Exceptions -> exit status and sentence; the first row that fits.
_ENDS = [
    (ConfigError, 2, "{}"),
    ((NonFinite, SaveFailed, DeadWorker, BadSet), 1, "{}"),
    (
        BadImages,
        1,
        f"{{}}; `{other_command('rope_jax.data.verify')}` lists all images that cannot be used, "
        "and --config.data.bad_images=skip skips them",
    ),
    (MemoryError, 1, f"there is too little memory ({{}}); {_LESS_MEMORY}"),
]


@contextlib.contextmanager
def exit_statuses(workdir: str, *, distributed: bool) -> Iterator[None]:
    """Turns exceptions into one line and the exit statuses that `commands.train` documents.

    Args:
        workdir: of the run.
        distributed: True for one of several processes.
    """
    try:
        yield
        return
    except (Exception, Interrupted) as error:
        status, sentence = _describe_end(error, workdir)
        if sentence is None:
            traceback.print_exc()
            if distributed:
                sentence = (
                    "if the connection to another process was lost, that process has ended, and "
                    "its own output has the reason; the same command resumes from the newest "
                    "checkpoint"
                )
    if status == 0:
        print(sentence)
        return
    if sentence is not None:
        print(f"rope_jax: {' '.join(sentence.split())}", file=sys.stderr)
    if distributed:
        time.sleep(_LAST_WORDS)
    sys.exit(status)


def _describe_end(error: BaseException, workdir: str) -> tuple[int, str | None]:
    """The exit status and the sentence of an exception; None for one that needs its trace."""
    if isinstance(error, Interrupted):
        number = signal.Signals[str(error)]
        if error.alone:
            return 128 + number, (
                f"stopped by {error} without saving, as other processes wait for this one: the "
                "same command resumes from the newest checkpoint"
            )
        if not error.saved:
            return 128 + number, f"stopped by {error} before there was anything to save"
        return 0, f"stopped by {error}; saved in {workdir}: run the same command to resume"
    for kind, status, sentence in _ENDS:
        if isinstance(error, kind):
            return status, sentence.format(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        line = str(error).partition("\n")[0][:200]
        return 1, f"the device has too little memory ({line}); {_LESS_MEMORY}"
    return 1, None


@contextlib.contextmanager
def exit_at_once() -> Iterator[None]:
    """Ends the process after this context, with the status of a SystemExit in it.

    A normal exit waits for threads and workers: forever, if a file system does not respond.
    """
    status = 0
    try:
        yield
    except SystemExit as error:
        status = error.code or 0
    print(end="", flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)
