"""How processes find each other; `tests/faults/attacks/several.py` starts some."""

import socket
import threading

import jax
import pytest

from rope_jax import processes


@pytest.fixture
def variables(monkeypatch):
    """Sets the environment that `join` reads."""
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    return lambda **given: [monkeypatch.setenv(f"JAX_{name}", x) for name, x in given.items()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"COORDINATOR_ADDRESS": "first"}, "JAX_COORDINATOR_ADDRESS=first must be host:port"),
        ({"COORDINATOR_ADDRESS": "first:"}, "JAX_COORDINATOR_ADDRESS=first: must be host:port"),
        ({"NUM_PROCESSES": "2.5"}, "JAX_NUM_PROCESSES=2.5 must be a whole number"),
        ({"PROCESS_ID": "-1"}, "JAX_PROCESS_ID=-1 must be a whole number"),
        ({"PROCESS_ID": "2", "NUM_PROCESSES": "2"}, "must be less than JAX_NUM_PROCESSES=2"),
    ],
)
def test_settings_are_checked(variables, given, message):
    variables(**given)
    with pytest.raises(ValueError, match=message):
        processes.join(10, 10)


def test_a_port_must_be_free(variables):
    with socket.create_server(("", 0)) as used:
        address = f"localhost:{used.getsockname()[1]}"
        variables(COORDINATOR_ADDRESS=address, NUM_PROCESSES="2", PROCESS_ID="0")
        with pytest.raises(ValueError, match=f"listen on the port of {address}"):
            processes.join(10, 10)
    processes._require_free_port()


def test_joining_is_bounded_and_reported(variables, monkeypatch, capsys):
    """jax itself would wait for minutes, and then abort the process."""
    variables(COORDINATOR_ADDRESS="[::1]:80", NUM_PROCESSES="2", PROCESS_ID="1")
    monkeypatch.setattr(processes, "_SAY_EVERY", 1)
    end, given = threading.Event(), []
    wait = lambda **options: given.append(options) or end.wait(30)
    monkeypatch.setattr(jax.distributed, "initialize", wait)
    with pytest.raises(ValueError, match=r"joined at \[::1\]:80 within 1 s: .* --join_timeout"):
        processes.join(5, 1)
    end.set()
    assert "waiting for all processes to join at [::1]:80: 1 of 1 s" in capsys.readouterr().err
    assert given[0]["heartbeat_timeout_seconds"] == 5
    assert given[0]["initialization_timeout"] > 1


def test_errors_of_jax_are_explained(variables, monkeypatch):
    def fail(**_):
        raise jax.errors.JaxRuntimeError("UNKNOWN: Failed to start RPC server")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(ValueError, match="another program does: choose another"):
        processes.join(5, 1)
