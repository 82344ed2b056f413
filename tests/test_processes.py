"""How processes find each other; `tests/faults/attacks/several.py` starts some."""

import os
import time

import jax

from rope_jax import processes


def test_joining_is_bounded(monkeypatch, capsys):
    """jax itself would abort the process, without a sentence."""
    variables = {"COORDINATOR_ADDRESS": "[::1]:80", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    ended, given = [], []
    monkeypatch.setattr(os, "_exit", ended.append)
    wait = lambda **options: given.append(options) or time.sleep(1.5)
    monkeypatch.setattr(jax.distributed, "initialize", wait)
    processes.join(5, 1)
    assert ended == [2]
    said = capsys.readouterr().err
    assert "joined at [::1]:80 within 1 s" in said
    assert "--join_timeout" in said
    assert given[0]["initialization_timeout"] > 1
    assert (given[0]["heartbeat_timeout_seconds"], given[0]["process_id"]) == (5, 1)
