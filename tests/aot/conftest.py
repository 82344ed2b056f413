"""Compiles ahead of time for a GPU, with jax's CUDA plugin, which `make test-aot` installs."""

import functools

import pytest

from benchmarks._gpus import absent_gpus
from benchmarks._listing import tool_path


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
