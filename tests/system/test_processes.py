"""The coordination of processes; `tests/faults/attacks/several.py` starts some."""

import jax
import pytest

from rope_jax.system import processes


def test_silent_processes_are_lost_after_the_heartbeat(monkeypatch):
    arguments = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: arguments.update(options))
    processes.join(5, 20)
    assert arguments["heartbeat_timeout_seconds"] == 5
    assert arguments["initialization_timeout"] > 20  # this process ends before with an error


def test_missing_addresses_are_explained():
    with pytest.raises(ValueError, match=r"set JAX_COORDINATOR_ADDRESS=host:port.*leave --distrib"):
        processes.join(5, 20)
