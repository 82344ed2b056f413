"""The processes of a run: how they find each other, and exchange texts."""

import os
import re
import socket
import threading
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from rope_jax.files import warn

_ADDRESS = "JAX_COORDINATOR_ADDRESS"
_NUMBERS = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
_NO_PORT = (
    "the first process cannot listen on the port of {}; most likely another program does: choose "
    f"another one in {_ADDRESS} (JAX_COORDINATOR_PORT under SLURM and Open MPI)"
)
_SAY_EVERY = 15  # seconds
_END_TOGETHER = 60  # how long a finished process waits for the others to finish, in seconds


def join(heartbeat: int, timeout: int) -> None:
    """Connects the processes of a run (`jax.distributed`); call it before any other use of jax.

    SLURM, Kubernetes and Open MPI are detected. Elsewhere set JAX_COORDINATOR_ADDRESS (host:port
    of the first process), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Args:
        heartbeat: seconds after which a silent process counts as dead, and the others end.
        timeout: seconds to wait for all processes.

    Raises:
        ValueError: the other processes are unknown, or have not all joined in time.
    """
    settings = _settings()
    if settings.get("process_id") == 0:
        _require_free_port()
    failures: list[Exception] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(
                heartbeat_timeout_seconds=heartbeat,
                initialization_timeout=timeout + 60,  # jax aborts the process then
                shutdown_timeout_seconds=_END_TOGETHER,
                **settings,
            )
        except Exception as error:
            failures.append(error)

    # In a thread, so that this one can report, stop in time, and respond to signals.
    thread, begun = threading.Thread(target=connect, daemon=True), time.monotonic()
    thread.start()
    address = os.environ.get(_ADDRESS, "the address of the first process")
    for second in range(1, timeout + 1):
        thread.join(begun + second - time.monotonic())
        if not thread.is_alive():
            break
        if second % _SAY_EVERY == 0:
            warn(f"waiting for all processes to join at {address}: {second} of {timeout} s")
    else:
        raise ValueError(
            f"not all processes have joined at {address} within {timeout} s{_unknown_host()}: see "
            "that each is started, has its own number, and can reach that address; --join_timeout "
            "sets another limit"
        )
    for error in failures:
        raise _explained(error, address) from error


def _settings() -> dict[str, int]:
    """What the environment says about the processes, checked."""
    address = os.environ.get(_ADDRESS)
    if address is not None and not re.fullmatch(r"(\[[^]]+\]|[^:]+):\d{1,5}", address):
        raise ValueError(
            f"{_ADDRESS}={address} must be host:port, such as first-machine:1234: the first "
            "process listens on that port"
        )
    given = {name: os.environ[word] for name, word in _NUMBERS.items() if word in os.environ}
    for name, text in given.items():
        if not re.fullmatch(r"\d+", text):
            raise ValueError(f"{_NUMBERS[name]}={text} must be a whole number")
    numbers = {name: int(text) for name, text in given.items()}
    if len(numbers) == 2 and numbers["process_id"] >= numbers["num_processes"]:
        raise ValueError(
            f"JAX_PROCESS_ID={numbers['process_id']} must be less than "
            f"JAX_NUM_PROCESSES={numbers['num_processes']}: processes are numbered from 0"
        )
    return numbers


def _require_free_port() -> None:
    """Rejects a port that another program uses, at which jax may crash."""
    address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", os.environ.get(_ADDRESS, ""))
    port, dual = address.rpartition(":")[2], socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        if port.isdecimal():
            socket.create_server(("", int(port)), family=family, dualstack_ipv6=dual).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"{_NO_PORT.format(address)} ({error})") from error


def _unknown_host() -> str:
    host = os.environ.get(_ADDRESS, "").rpartition(":")[0].strip("[]")
    try:
        socket.getaddrinfo(host or None, 0)
    except OSError as error:
        return f" ({host}: {error.strerror})"
    return ""


def _explained(error: Exception, address: str) -> Exception:
    """An error of `jax.distributed.initialize` in the terms of this module."""
    if isinstance(error, (ValueError, TypeError)):
        return ValueError(
            f"this is no job of SLURM, Kubernetes or Open MPI ({error}): set "
            f"{_ADDRESS}=host:port, {' and '.join(_NUMBERS.values())}, or leave --distributed out"
        )
    if "Failed to start RPC server" in str(error):
        return ValueError(_NO_PORT.format(address))
    return ValueError(f"the processes could not be connected: {error}")


def texts_of_all(text: str) -> list[str]:
    """The texts of all processes, in the order of their numbers, in each of them."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = _of_all(np.int32(len(data)))
    padded = np.zeros(max(1, sizes.max()), np.uint8)
    padded[: len(data)] = data
    rows = _of_all(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def text_of_first(text: str) -> str:
    """The first process's text, in all processes."""
    return texts_of_all(text)[0]


def _of_all(array: Any) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(array))
