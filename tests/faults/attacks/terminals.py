"""Closed terminals and unread pipes."""

import fcntl
import os
import pty
import select
import signal
import termios
import time

from tests.faults.attacks import ENDLESS, attack, durable, expect, expect_end, expect_saved, start


def _on_terminal() -> None:
    """Makes TEST_TERMINAL the controlling terminal of this process: input, output and errors."""
    os.setsid()
    terminal = os.open(os.environ["TEST_TERMINAL"], os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for descriptor in (0, 1, 2):
        os.dup2(terminal, descriptor)


def read_until(descriptor: int, mark: bytes, seconds: float = 90) -> bytes:
    """Reads the output of a run until a mark appears."""
    text, deadline = b"", time.monotonic() + seconds
    while mark not in text:
        remaining = max(0.0, deadline - time.monotonic())
        came = select.select([descriptor], [], [], remaining)[0] and os.read(descriptor, 4096)
        expect(came, f"{mark} did not appear: {text[-2000:]}")
        text += came
    return text


@attack("a terminal that is closed", tries=4)
def close_terminal(folder, number, rng):
    """The kernel and the shell send SIGHUP, and every print fails."""
    controller, terminal = pty.openpty()
    variables = {"TEST_TERMINAL": os.ttyname(terminal)}
    arguments = [ENDLESS, "--config.checkpoint_every=100000"]
    run = start(folder, *arguments, environment=variables, prepare=_on_terminal)
    try:
        read_until(controller, b"\nstep %5d/" % rng.integers(2, 30))
        os.close(terminal)
    finally:
        os.close(controller)
    if number % 2:
        time.sleep(rng.uniform(0, 0.5))
        if run.returncode is None:
            run.send(signal.SIGHUP)  # the shell's
    expect_saved(folder, [run])


def _into_pipe() -> None:
    """Makes the named pipe TEST_PIPE this process's output and errors."""
    pipe = os.open(os.environ["TEST_PIPE"], os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(pipe, descriptor)


@attack("a pipe that is closed, as by `head`", tries=4)
def close_pipe(folder, number, rng):
    os.mkfifo(folder / "pipe")
    variables = {"TEST_PIPE": str(folder / "pipe")}
    run = start(folder, environment=variables, prepare=_into_pipe)
    pipe = os.open(folder / "pipe", os.O_RDONLY)
    try:
        read_until(pipe, [b"parameter", b"\nstep  3/", b"saved step"][number % 3])
    finally:
        os.close(pipe)
    expect_end([run])
    expect(durable(folder / "run") == 36, "the run did not go on to its end")
    expect((folder / "run" / "results.json").exists(), "the run was not evaluated")
