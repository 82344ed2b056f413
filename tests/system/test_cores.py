"""The cores and the memory of a process."""

import ctypes
import os
import subprocess
import sys

import pytest

from rope_jax.system import cores


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulates eight cores, and replaces the machine's folders of limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "_LIMITS", tmp_path)
    monkeypatch.setattr(cores, "_OWN_GROUPS", tmp_path / "groups")
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"groups": "0::/", "cpu.max": "max 100000"}, 8),
        ({"groups": "0::/", "cpu.max": "300000 100000"}, 3),
        ({"groups": "0::/", "cpu.max": "150000 100000"}, 2),  # a core and a half
        ({"groups": "0::/", "cpu.max": "1000 100000"}, 1),
        ({"groups": "0::/a/b", "a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2),
        ({"groups": "0::/a/b", "a/cpu.max": "600000 100000", "a/b/cpu.max": "400000 100000"}, 4),
        ({"groups": "0::/", "cpu.max": "nonsense"}, 8),
        ({"groups": "0::/", "cpu.max": "9900000 100000"}, 8),  # more than there are
    ],
)
def test_cores_follow_affinity_and_container(machine, files, expected):
    for name, content in files.items():
        path = machine / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    assert cores.cores() == expected


# Counts page faults of a thread that allocates, fills and frees arrays of 20 and of 100 MiB.
_FAULTS = """
import ctypes, resource, sys, threading
import jax
from rope_jax.system.sharding import start_devices
{"commands": start_devices, "others": jax.devices}[sys.argv[1]]()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
faults = []
def call():
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        sizes = [20 * 2**20, 100 * 2**20, 20 * 2**20]
        arrays = [libc.malloc(size) for size in sizes]
        for array, size in zip(arrays, sizes):
            ctypes.memset(array, 1, size)
        for array in arrays:
            libc.free(array)
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
thread = threading.Thread(target=call)
thread.start()
thread.join()
print(max(faults[1:]))
"""


def count_faults(started_as):
    allocator_prefixes = ("MALLOC_", "GLIBC_TUNABLES")
    run = subprocess.run(
        [sys.executable, "-c", _FAULTS, started_as],
        env={
            name: value
            for name, value in os.environ.items()
            if not name.startswith(allocator_prefixes)
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return int(run.stdout)


@pytest.mark.process
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_freed_memory_is_reused_between_calls():
    assert 10 * count_faults("commands") < count_faults("others")


@pytest.mark.parametrize(
    "variable", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"]
)
def test_memory_settings_of_the_user_have_precedence(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("looks for mallopt"))
    assert not cores.keep_freed_memory()


@pytest.mark.parametrize("highest", [None, 2**25, 2**30])
def test_thresholds_follow_the_library(monkeypatch, highest):
    monkeypatch.setattr(os, "environ", {})
    chosen = {}

    class Library:
        if highest:

            def mallopt(self, number, value):
                if number == -3 and value > highest:
                    return 0
                chosen[number] = value
                return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert cores.keep_freed_memory() == bool(highest)
    assert chosen == ({-3: highest, -1: 2**31 - 1, -8: 1} if highest else {})
