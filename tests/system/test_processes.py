"""Cores, memory and compiled programs of a process, and its agreement with others.

`tests/faults/attacks/several.py` starts several.
"""

import ctypes
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from rope_jax.system import cores, processes
from rope_jax.system.compilation import keep_compiled
from rope_jax.system.files import cache_folder
from rope_jax_kernels.tuning import choices


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulates eight cores, and replaces the machine's folders of limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "_LIMITS", tmp_path / "limits")
    monkeypatch.setattr(cores, "_OWN_GROUPS", tmp_path / "groups")
    return tmp_path


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (None, {}, 8),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "300000 100000"}, 3),
        ("0::/", {"cpu.max": "150000 100000"}, 2),  # a core and a half
        ("0::/", {"cpu.max": "1000 100000"}, 1),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2),
        ("0::/a/b", {"a/cpu.max": "600000 100000", "a/b/cpu.max": "400000 100000"}, 4),
        ("0::/", {"cpu.max": "nonsense"}, 8),
        ("0::/", {"cpu.max": "9900000 100000"}, 8),  # more than there are
    ],
)
def test_cores_follow_affinity_and_container(machine, groups, files, expected):
    if groups is not None:
        (machine / "groups").write_text(groups + "\n")
    for name, content in files.items():
        path = machine / "limits" / name
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


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ROPE_JAX_CACHE", str(tmp_path / "chosen"))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_programs_are_cached_and_read_again(no_cache):
    keep_compiled()
    function = jax.jit(lambda x: x * 2 + 12345)
    for _ in range(2):
        assert function(jnp.ones(())) == 12347
        function.clear_cache()
        (entry,) = (no_cache / "chosen" / "xla").glob("*lambda*-cache")
        entry.write_bytes(entry.read_bytes()[:-10])  # a damaged entry is compiled again


def test_other_cache_folders_are_kept(no_cache):
    jax.config.update("jax_compilation_cache_dir", str(no_cache / "own"))
    keep_compiled()
    assert jax.config.jax_compilation_cache_dir == str(no_cache / "own")


def test_unusable_cache_folders_are_tolerated(no_cache):
    (no_cache / "chosen").write_text("a file")
    keep_compiled()
    assert jax.jit(lambda x: x * 3 + 12345)(jnp.ones(())) == 12348


def test_tests_do_not_fill_the_users_cache():
    """Neither in this process, nor in those that it starts."""
    folder = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder != cache_folder() / "xla"


def test_standalone_kernels_use_the_same_cache_folder(tmp_path, monkeypatch):
    for name in ("ROPE_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert choices.cache_folder() == cache_folder() / "kernels"
    for name in ("XDG_CACHE_HOME", "ROPE_JAX_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert choices.cache_folder() == cache_folder() / "kernels"
