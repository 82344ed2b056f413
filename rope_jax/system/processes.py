"""The processes of a run: how they find each other, and exchange texts."""

import collections
import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from rope_jax.system.files import warn

_ADDRESS = "JAX_COORDINATOR_ADDRESS"
_NUMBERS = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
_END_TOGETHER = 60  # how long a finished process waits for the others to finish, in seconds


def join(heartbeat: int, timeout: int) -> None:
    """Connects the processes of a run (`jax.distributed`); call it before any other use of jax.

    SLURM, Kubernetes and Open MPI are detected. Elsewhere set JAX_COORDINATOR_ADDRESS (host:port
    of the first process), JAX_NUM_PROCESSES and JAX_PROCESS_ID. Where not all processes join in
    time, this process ends with one line and status 2.

    Args:
        heartbeat: seconds after which a silent process counts as dead, and the others end.
        timeout: seconds to wait for all processes.

    Raises:
        ValueError: the other processes are unknown, or cannot be reached.
    """
    late = threading.Timer(timeout, _give_up, [timeout])  # jax would abort, with a stack trace
    late.start()
    try:
        numbers = {name: int(os.environ[x]) for name, x in _NUMBERS.items() if x in os.environ}
        if numbers.get("process_id") == 0:  # where another program has the port, jax may crash
            bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", os.environ.get(_ADDRESS, ""))
            socket.create_server(("", int(bound.rpartition(":")[2]))).close()
        jax.distributed.initialize(
            heartbeat_timeout_seconds=heartbeat,
            initialization_timeout=timeout + 60,
            shutdown_timeout_seconds=_END_TOGETHER,
            **numbers,
        )
    except Exception as error:
        raise ValueError(
            f"the processes cannot be connected ({error}): where SLURM, Kubernetes or Open MPI "
            f"have not started them, set {_ADDRESS}=host:port, with a free port of the first "
            f"process's host, {' and '.join(_NUMBERS.values())}, or leave --distributed out"
        ) from error
    finally:
        late.cancel()


def _give_up(timeout: int) -> None:
    address = os.environ.get(_ADDRESS, "the address of the first process")
    warn(
        f"not all processes have joined at {address} within {timeout} s: see that each is started, "
        "has its own number, and can reach that address; --join_timeout sets another limit"
    )
    os._exit(2)


def require_equal_devices() -> None:
    """Compares the numbers of devices of all processes, which must be equal to exchange texts.

    Raises:
        ValueError: in all processes, if they differ.
    """
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        words = [f"process {number} has {count}" for number, count in sorted(counts.items())]
        raise ValueError(
            f"the processes have different numbers of devices ({', '.join(words)}): start all "
            "with as many"
        )


def gather_texts(text: str) -> list[str]:
    """Gathers the texts of all processes, in the order of their numbers, in each of them."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = _gather(np.int32(len(data)))
    padded = np.zeros(max(1, sizes.max()), np.uint8)
    padded[: len(data)] = data
    rows = _gather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def decide_by_first(choose: Callable[[], Any], kind: type[OSError] = OSError) -> Any:
    """Shares the first process's choice, a value of JSON, with all processes; all must call this.

    Args:
        choose: called by the first process.
        kind: the exception that all processes raise for its ValueError or OSError, if there are
            several processes.
    """
    if jax.process_count() == 1:
        return choose()
    answer: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            answer["choice"] = choose()
        except (ValueError, OSError) as error:
            answer["error"] = str(error)
    answer = json.loads(gather_texts(json.dumps(answer))[0])
    if "error" in answer:
        raise kind(answer["error"])
    return answer["choice"]


def _gather(array: Any) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(array))
