"""How processes find each other; `tests/faults/attacks/several.py` starts some."""

import types

import jax
import pytest

from rope_jax.system import processes


def test_a_silent_process_is_given_up_after_the_heartbeat(monkeypatch):
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: given.update(options))
    processes.join(5, 20)
    assert given["heartbeat_timeout_seconds"] == 5
    assert given["initialization_timeout"] > 20  # before, this process ends with a sentence


def test_processes_have_equal_numbers_of_devices(monkeypatch):
    """jax could not exchange a text, and so not what differs."""
    devices = [types.SimpleNamespace(process_index=k) for k in (0, 0, 1, 1)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    processes.require_equal_devices()
    devices.pop()
    with pytest.raises(ValueError, match="process 0 has 2, process 1 has 1"):
        processes.require_equal_devices()


def test_a_process_that_nobody_has_told_of_others_says_so():
    with pytest.raises(ValueError, match=r"set JAX_COORDINATOR_ADDRESS=host:port.*leave --distrib"):
        processes.join(5, 20)
