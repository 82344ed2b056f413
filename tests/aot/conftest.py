"""Compiles ahead of time for a GPU, with jax's CUDA plugin, which `make test-aot` installs."""

import functools

import pytest

from benchmarks._gpus import absent_gpus
from tests.aot.program import compile_program


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
    """compile_for(mesh_shape, f, *shapes, specs=None, donate=(), on=gpus) -> `program.Program`.

    The mesh has the axes "data" and "heads".
    """

    def compile_on_mesh(mesh_shape, f, *shapes, on=gpus, **options):
        return compile_program(on, mesh_shape, tmp_path, f, shapes, **options)

    return compile_on_mesh
