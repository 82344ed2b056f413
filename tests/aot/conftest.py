"""Compiles ahead of time for a GPU, with jax's CUDA plugin, which `make test-aot` installs."""

import functools
import importlib.util
import os
import pathlib
import re

import pytest

from benchmarks.machine_code import tool_path

HERE = pathlib.Path(__file__).parent
PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def pytest_collection_modifyitems(items):
    """Skips this directory's tests where they cannot run, with the reason."""
    if not (
        importlib.util.find_spec("jax_plugins") and any(map(importlib.util.find_spec, PLUGINS))
    ):
        reason = "jax's CUDA plugin is not installed; run `make test-aot`"
    elif os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") != "1":
        reason = (
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 is not set, so the CUDA plugin would need a driver; "
            "run `make test-aot`"
        )
    elif tool_path("ptxas") is None:
        reason = "there is no ptxas, neither in the nvidia wheels nor on PATH; run `make test-aot`"
    else:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


# How other GPUs differ from the H200 of tests/data: NVIDIA's data sheets, and "Technical
# specifications per compute capability" in the CUDA programming guide.
OTHERS = {
    "NVIDIA A100-SXM4-80GB": {
        "major": 8,
        "core_count": 108,
        "fpus_per_core": 64,
        "shared_memory_per_core": 167936,
        "shared_memory_per_block_optin": 166912,
        "l2_cache_size": 41943040,
        "memory_bandwidth": 2039000000000,
        "device_memory_size": 85899345920,
        "clock_rate_ghz": 1.41,
    },
    "NVIDIA L4": {
        "major": 8,
        "minor": 9,
        "core_count": 58,
        "threads_per_core_limit": 1536,
        "shared_memory_per_core": 102400,
        "shared_memory_per_block_optin": 101376,
        "l2_cache_size": 50331648,
        "memory_bandwidth": 300000000000,
        "device_memory_size": 24000000000,
        "clock_rate_ghz": 2.04,
    },
    "Tesla T4": {
        "major": 7,
        "minor": 5,
        "core_count": 40,
        "fpus_per_core": 64,
        "threads_per_core_limit": 1024,
        "shared_memory_per_core": 65536,
        "shared_memory_per_block_optin": 65536,
        "l2_cache_size": 4194304,
        "memory_bandwidth": 320000000000,
        "device_memory_size": 16000000000,
        "clock_rate_ghz": 1.59,
    },
}


def described(kind: str, count: int) -> list:
    """GPUs of one host that are not there, by their kind."""
    from jax.experimental import topologies

    target = (HERE.parent / "data" / "h200.txtpb").read_text()
    for name, value in OTHERS.get(kind, {}).items():
        # The capability's major and minor precede cuDNN's.
        target, found = re.subn(rf"\b{name}: [\d.]+", f"{name}: {value}", target, count=1)
        assert found, name
    target = target.replace("NVIDIA H200", kind)
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind.replace(" ", "_"),
        topology=f"1x1x{count}",
        target_config=target,
    ).devices


@pytest.fixture(scope="session")
def gpus():
    """Eight H200s of one host."""
    return described("NVIDIA H200", 8)


@pytest.fixture(scope="session")
def gpu_of():
    """gpu_of(kind) -> one GPU of this kind."""
    return functools.cache(lambda kind: described(kind, 1)[0])


@pytest.fixture
def compile_for(gpus, tmp_path):
    """compile_for(mesh_shape, f, *shapes, specs=None, donate=()) -> `program.Program`.

    The mesh has the axes "data" and "heads".
    """
    from tests.aot.program import compile_program

    def compile_one(mesh_shape, f, *shapes, **kwargs):
        assembler = tool_path("ptxas")
        return compile_program(gpus, mesh_shape, tmp_path, assembler, f, shapes, **kwargs)

    return compile_one
