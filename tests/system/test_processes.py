"""The coordination of processes; `tests/faults/attacks/several.py` starts some."""

import types

import jax
import pytest

from rope_jax.system import processes


def test_silent_processes_are_lost_after_the_heartbeat(monkeypatch):
    arguments = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: arguments.update(options))
    processes.join(5, 20)
    assert arguments["heartbeat_timeout_seconds"] == 5
    assert arguments["initialization_timeout"] > 20  # this process ends before with an error


def test_processes_have_equal_numbers_of_devices(monkeypatch):
    """jax could not exchange a text, and therefore not the differences."""
    devices = [types.SimpleNamespace(process_index=k) for k in (0, 0, 1, 1)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    processes.require_equal_devices()
    devices.pop()
    with pytest.raises(ValueError, match="process 0 has 2, process 1 has 1"):
        processes.require_equal_devices()


def test_missing_addresses_are_explained():
    with pytest.raises(ValueError, match=r"set JAX_COORDINATOR_ADDRESS=host:port.*leave --distrib"):
        processes.join(5, 20)
