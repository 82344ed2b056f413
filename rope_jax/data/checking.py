"""The checksums of an image set, compared in the background while its images are used."""

import itertools
import pathlib
import threading
import traceback

from rope_jax.data.ahead import _SAY_EVERY, Waiting
from rope_jax.data.sources import Images, Streamed
from rope_jax.data.sources.index import BadSet
from rope_jax.files import RETRY_AFTER, has_sha256, retried, warn

# Files that this process has read, with the checksums that they had: each is read once.
_INTACT: set[tuple[pathlib.Path, str]] = set()


class FileCheck:
    """Compares the files of a set with their checksums, once in a process, in a thread.

    Sets without checksums pass at once. hashlib computes beside Python's own work.
    """

    def __init__(self, images: Images | Streamed, waiting: Waiting):
        """The first call starts the thread, which ends with the process.

        Args:
            images: the set.
            waiting: called once a second while the end is awaited, with the seconds so far.
        """
        self._images, self._waiting, self._stop = images, waiting, threading.Event()
        self._damaged: list[str] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._damaged = self._images.source.damaged(self._intact) or []
        except Exception as error:  # any: a thread that died would count as a check that passed
            self._error = error

    def _intact(self, path: pathlib.Path, sha256: str) -> bool:
        """Whether a file has its checksum; True after `close`, and after the first that has not."""
        if self._stop.is_set() or (path, sha256) in _INTACT:
            return True
        if retried(lambda: has_sha256(path, sha256), RETRY_AFTER):
            _INTACT.add((path, sha256))
            return True
        self._stop.set()
        return False

    def __call__(self, *, wait: bool) -> None:
        """Raises what was found so far.

        Args:
            wait: for the end of the check.

        Raises:
            BadSet: a file has changed since it was written, or cannot be read.
        """
        if self._images.in_memory:
            return
        if self._thread.ident is None:
            self._thread.start()
        if wait:
            self._wait()
        if self._thread.is_alive():
            return
        name = self._images.name
        if self._error is not None:
            reason = "".join(traceback.format_exception_only(self._error)).strip()
            raise BadSet(f"the files of {name} cannot be checked: {reason}") from self._error
        if self._damaged:
            raise BadSet(
                f"{self._damaged[0]} of {name} ({self._images.source.index}) has changed since it "
                "was written: restore it, or prepare the set again"
            )

    def _wait(self) -> None:
        for seconds in itertools.count(1):
            self._thread.join(1.0)
            if not self._thread.is_alive():
                return
            if seconds % _SAY_EVERY == 0:
                what = f"the checksums of {self._images.name}, {self._images.split} split"
                warn(f"WARNING: {seconds} s without a batch: waiting for {what}")
            self._waiting(seconds)

    def close(self) -> None:
        """Ends the check after the current file."""
        self._stop.set()
