"""Runs of `python -m rope_jax.main` in processes of their own, forked from one that has imported everything: they begin at once."""

import atexit
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Sequence

_ROOT = pathlib.Path(__file__).parents[1]
_FORKS = multiprocessing.get_context("forkserver")
# What a run on the CPU imports, sooner or later. Nothing of it may start a backend of jax, whose threads a fork would not survive.
_FORKS.set_forkserver_preload([__name__, "rope_jax.main", "sklearn.datasets", "matplotlib.figure", "matplotlib.backends.backend_agg"])


class Run:
    """A run on the CPU that has been started. What it compiles it keeps where JAX_COMPILATION_CACHE_DIR says.

    Attributes:
        output: the file with all that it says.
        pid: of its process.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        output: pathlib.Path,
        *,
        environment: dict[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
    ):
        """Starts it.

        Args:
            arguments: of the command, which is run in the repository's root.
            output: file for what it says.
            environment: variables to set.
            prepare: a function of a module, called before the command.
        """
        self.output = output
        output.write_text("")
        self._process = _FORKS.Process(target=_run, args=(list(arguments), str(output), environment or {}, prepare))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, minus the number of the signal that ended it, or None while it goes on."""
        return self._process.exitcode

    def said(self) -> str:
        """All that it has said, after a line break, so that every line begins with one."""
        return "\n" + self.output.read_text()

    def has_said(self, *marks: str) -> bool:
        """Whether one of these is in it."""
        said = self.said()
        return any(mark in said for mark in marks)

    def wait(self, seconds: float) -> int | None:
        """Waits for the end, but not longer; returns the exit status, None where the run goes on."""
        self._process.join(seconds)
        return self.returncode

    def wait_for(self, *marks: str, seconds: float = 300) -> float:
        """Waits until it has said one of these, or has ended; returns when that was.

        Raises:
            TimeoutError: neither happened in these seconds.
        """
        deadline = time.monotonic() + seconds
        while not self.has_said(*marks) and self.returncode is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"none of {marks} within {seconds} s: {self.said()}")
            time.sleep(0.03)
        return time.monotonic()

    def send(self, number: int) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it as no program can prevent, if it has not ended."""
        self._process.kill()
        self._process.join()


def _run(arguments: list[str], output: str, environment: dict[str, str], prepare: Callable[[], None] | None) -> None:
    """What the new process does."""
    import jax

    from rope_jax import main

    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))  # noqa: SIM115
    os.chdir(_ROOT)
    sys.argv = ["rope_jax.main", *arguments]  # where ml_collections looks
    os.environ.update(environment)
    time.tzset()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if prepare is not None:
            prepare()
        main.app.run(main._main, argv=sys.argv, flags_parser=main._parse_flags)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
