"""Compiles ahead of time for a GPU, with jax's CUDA plugin, which `make test-aot` installs."""

import functools
import importlib.util
import os
import pathlib

import pytest

from benchmarks._gpus import absent_gpus
from benchmarks._listing import tool_path

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


@pytest.fixture(scope="session")
def gpus():
    """Eight H200s of one host."""
    return absent_gpus(1, 8)


@pytest.fixture(scope="session")
def gpu_of():
    """gpu_of(kind) -> one GPU of this kind."""
    return functools.cache(lambda kind: absent_gpus(kind=kind)[0])


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
