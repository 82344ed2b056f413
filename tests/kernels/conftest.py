"""Fixtures that the tests of all kernels use."""

import jaxtyping
import pytest


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run in interpret mode."""
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
    """As `kernel`, where mosaic is slow: for properties of the operation around a kernel."""
    return request.param


@pytest.fixture
def unchecked_annotations():
    """Without the checks of annotations, which come before the functions' own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
