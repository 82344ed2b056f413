"""The checksums of an image set, compared in the background while its images are used."""

import itertools
import threading
from collections.abc import Callable

from rope_jax.data.sources import Images, Streamed
from rope_jax.data.sources.index import BadImages


class FileCheck:
    """Compares the files of a set with their checksums, once, in a thread.

    Sets without checksums pass at once. hashlib computes about 2 GB/s, beside Python's own work.
    """

    def __init__(self, images: Images | Streamed, waiting: Callable[[int], None]):
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
            self._damaged = self._images.source.damaged(self._stop.is_set) or []
        except (OSError, ValueError) as error:
            self._error = error

    def __call__(self, *, wait: bool) -> None:
        """Raises what was found so far.

        Args:
            wait: for the end of the check.

        Raises:
            BadImages: a file has changed since it was written, or cannot be read.
        """
        if self._images.in_memory:
            return
        if self._thread.ident is None:
            self._thread.start()
        for seconds in itertools.count(1):
            if not wait or not self._thread.is_alive():
                break
            self._thread.join(1.0)
            self._waiting(seconds)
        if self._thread.is_alive():
            return
        if self._error is not None:
            raise BadImages(f"{self._images.name} cannot be checked: {self._error}")
        if self._damaged:
            raise BadImages(
                f"{self._damaged[0]} of {self._images.name} ({self._images.source.index}) has "
                "changed since it was written: restore it, or prepare the set again"
            )

    def close(self) -> None:
        """Ends the check after the current file."""
        self._stop.set()
