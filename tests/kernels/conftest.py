"""Fixtures that the tests of all kernels use."""

import pytest


@pytest.fixture
def interpreted(monkeypatch):
    """Runs kernels in interpret mode."""
    monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")


@pytest.fixture(params=["xla", "triton", "mosaic"])
def implementation(request, interpreted):
    """Every implementation of the rotary operations; those for a GPU are interpreted."""
    return request.param


@pytest.fixture(params=["triton", "mosaic"])
def kernel(request, interpreted):
    """Every rotary kernel, interpreted."""
    return request.param


@pytest.fixture(params=["triton", pytest.param("mosaic", marks=pytest.mark.slow)])
def a_kernel(request, interpreted):
    """A kernel for properties of the surrounding operation; mosaic is slow."""
    return request.param
