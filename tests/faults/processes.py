"""Processes that run `python -m rope_jax.main`, forked from one that has imported everything."""

import atexit
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).parents[2]
_FORKS = multiprocessing.get_context("forkserver")
# The imports of a run on the CPU. None of them may start a backend of jax: its threads would not
# survive the fork.
_MATPLOTLIB = ["matplotlib.figure", "matplotlib.backends.backend_agg"]
_FORKS.set_forkserver_preload([__name__, "rope_jax.main", "sklearn.datasets", *_MATPLOTLIB])


class Run:
    """A started run on the CPU; its compilation cache is in JAX_COMPILATION_CACHE_DIR.

    Attributes:
        output: the file of its output.
        pid: its process id.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        output: pathlib.Path,
        *,
        environment: dict[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
    ):
        """Starts the run in the repository's root.

        Args:
            arguments: of the command.
            output: file for its output.
            environment: variables to set.
            prepare: a module-level function to call before the command.
        """
        self.output = output
        output.write_text("")
        arguments = (list(arguments), str(output), environment or {}, prepare)
        self._process = _FORKS.Process(target=_run, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, minus the signal that ended it, or None while it is running."""
        return self._process.exitcode

    def read_output(self) -> str:
        """The output so far, after a line break, so that every line follows one."""
        return "\n" + self.output.read_text()

    def wait(self, seconds: float) -> int | None:
        """Waits for the end, at most this long; returns the exit status or None."""
        self._process.join(seconds)
        return self.returncode

    def wait_for(self, mark: str, seconds: float = 300) -> float:
        """Waits until this is in its output, or until it ends; returns the time.

        Raises:
            TimeoutError: neither happened within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while mark not in self.read_output() and self.returncode is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {mark!r} within {seconds} s: {self.read_output()}")
            time.sleep(0.03)
        return time.monotonic()

    def send(self, number: int) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL to a running process, and waits for the end."""
        self._process.kill()
        self._process.join()


def _run(
    arguments: list[str],
    output: str,
    environment: dict[str, str],
    prepare: Callable[[], None] | None,
) -> None:
    """Runs the command in the new process."""
    import jax

    from rope_jax.commands import train as main

    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.chdir(ROOT)
    os.environ.update(environment)
    if prepare is not None:  # may replace the descriptors of the streams
        prepare()
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["rope_jax.main", *arguments]
    time.tzset()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored here too
    try:
        main.command()
    finally:
        atexit._run_exitfuncs()  # multiprocessing skips them
