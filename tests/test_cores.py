"""The cores and the memory of a process, and the devices of training on a CPU."""

import ctypes
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from rope_jax import cores, sharding
from rope_jax.config import Config, ConfigError, resolve, to_json
from rope_jax.run import with_cpu_devices
from rope_jax.training.setup import prepare
from tests.training.recipe import tiny


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Eight cores, and folders for limits in place of the machine's."""
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
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        (
            "4:cpu,cpuacct:/docker/x",  # whose group a container of version 1 sees as the root
            {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"},
            3,
        ),
        ("0::/", {"cpu.max": "nonsense"}, 8),
        ("0::/", {"cpu.max": "9900000 100000"}, 8),  # more than there are
    ],
)
def test_cores_are_those_of_affinity_and_container(machine, groups, files, expected):
    if groups is not None:
        (machine / "groups").write_text(groups + "\n")
    for name, content in files.items():
        path = machine / "limits" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    assert cores.cores() == expected


@pytest.mark.parametrize("available", [1, 2, 3, 8, 12, 64, 1000])
def test_devices_have_equal_parts_of_enough_images(available):
    for images in (1, 16, 31, 32, 100, 127, 128, 1000, 1024):
        count = cores.devices_for(images, available)
        assert 1 <= count <= min(available, cores.MOST)
        assert images % count == 0
        assert count == 1 or images // count >= cores.LEAST
        larger = range(count + 1, min(available, cores.MOST, images // cores.LEAST) + 1)
        assert all(images % other for other in larger)
    assert cores.devices_for(1024, available, fsdp=2) % 2 == (available == 1)


@pytest.fixture
def on_eight_cores(monkeypatch):
    """jax for a CPU alone, on a machine of eight cores, and none of jax's variables."""
    monkeypatch.setattr("rope_jax.run.cores", lambda: 8)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    kept = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", kept)


def devices_in(workdir, **changes):
    return with_cpu_devices(tiny(batch_size=128, **changes), workdir).mesh.cpu_devices


def test_a_new_run_has_a_device_a_core_and_a_resumed_one_keeps_its_own(on_eight_cores, tmp_path):
    assert devices_in(tmp_path) == 8
    assert devices_in(tmp_path, accumulate=2) == 4
    assert devices_in(tmp_path, mesh__cpu_devices=3) == 3
    stored = json.loads(to_json(Config()))
    stored["mesh"]["cpu_devices"] = 2
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert devices_in(tmp_path) == 8  # of a run that ended before its first checkpoint
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    for entry, expected in ((2, 2), (64, 64), (None, 8)):  # None: trained on a GPU so far
        stored["mesh"]["cpu_devices"] = entry
        (tmp_path / "config.json").write_text(json.dumps(stored))
        assert devices_in(tmp_path) == expected
        assert devices_in(tmp_path, mesh__cpu_devices=1) == 1
    del stored["mesh"]["cpu_devices"]
    for older in (stored, {}):
        (tmp_path / "config.json").write_text(json.dumps(older))
        assert devices_in(tmp_path) == 1
    (tmp_path / "config.json").write_text("damaged")
    assert devices_in(tmp_path) == 8
    (tmp_path / "config.json").write_text('{"mesh": {"cpu_devices": 1000000}}')
    with pytest.raises(ConfigError, match="cpu_devices=1000000 is out of range"):
        devices_in(tmp_path)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=4"),
        ("JAX_NUM_CPU_DEVICES", "4"),
    ],
)
def test_variables_of_the_user_win(on_eight_cores, tmp_path, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert devices_in(tmp_path) is None  # all that jax has
    with monkeypatch.context() as patch:
        patch.setattr(jax.config, "update", lambda *arguments: pytest.fail("changed jax"))
        sharding.start_devices(8)


def test_nothing_happens_where_a_gpu_may_be(on_eight_cores, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "jax_plugins" or None)
    assert devices_in(tmp_path) is None
    jax.config.update("jax_platforms", "cuda,cpu")
    assert devices_in(tmp_path) is None
    jax.config.update("jax_platforms", "cpu")
    assert devices_in(tmp_path) == 8


def test_a_run_has_at_most_the_devices_of_jax_and_records_them():
    config = tiny()
    assert config.mesh.cpu_devices is None
    for asked in (None, 4):
        mesh = dataclasses.replace(config.mesh, cpu_devices=asked)
        setup, _ = prepare(dataclasses.replace(config, mesh=mesh))
        assert setup.mesh.size == setup.config.mesh.cpu_devices == 1
    assert resolve(json.loads(to_json(setup.config))).mesh.cpu_devices == 1


# Counts page faults of a thread that allocates, fills and frees eight arrays of 20 MiB each.
_FAULTS = """
import ctypes, resource, sys, threading
import jax
from rope_jax.sharding import start_devices
{"commands": start_devices, "others": jax.devices}[sys.argv[1]]()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
faults = []
def call():
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        arrays = [libc.malloc(20 * 2**20) for _ in range(8)]
        for array in arrays:
            ctypes.memset(array, 1, 20 * 2**20)
        for array in arrays:
            libc.free(array)
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
thread = threading.Thread(target=call)
thread.start()
thread.join()
print(max(faults[1:]))
"""


def faults_of_a_call(started_as):
    own = ("MALLOC_", "GLIBC_TUNABLES")
    run = subprocess.run(
        [sys.executable, "-c", _FAULTS, started_as],
        env={name: value for name, value in os.environ.items() if not name.startswith(own)},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(run.stdout)


@pytest.mark.process
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_memory_is_not_cleared_again_for_every_call():
    assert 10 * faults_of_a_call("commands") < faults_of_a_call("others")


@pytest.mark.parametrize(
    "variable",
    [*(f"MALLOC_{name}_" for name in cores._MALLOPT), "GLIBC_TUNABLES"],
)
def test_settings_of_the_user_for_memory_win(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("looks for mallopt"))
    assert not cores.keep_freed_memory()


@pytest.mark.parametrize("highest", [None, 2**25, 2**30])
def test_thresholds_are_those_that_the_library_allows(monkeypatch, highest):
    for name in cores._MALLOPT:
        monkeypatch.delenv(f"MALLOC_{name}_", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
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
    assert chosen == ({-3: highest, -1: 2**31 - 1, -2: 2**27} if highest else {})
