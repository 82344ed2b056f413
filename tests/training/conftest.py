import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def quick_compiles_of_all():
    """As `quick_compiles`, for all tests of training: runs in fixtures are compared bit for bit."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
