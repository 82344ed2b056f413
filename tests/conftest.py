"""Checks every annotation of the two packages while tests run, and offers what many tests need."""

import sys

import jaxtyping
import pytest

_PACKAGES = ("rope_jax", "rope_jax_kernels")
if imported := sorted(name for name in sys.modules if name.split(".")[0] in _PACKAGES):
    raise RuntimeError(f"{imported} were imported before their annotations could be checked: remove the plugin that does so")
# Shapes, dtypes and types of all arguments and results: a jaxtyping annotation that is not true fails the test that finds out.
jaxtyping.install_import_hook(_PACKAGES, "beartype.beartype")


def pytest_collection_modifyitems(items):
    """Skips tests marked `gpu` where there is none."""
    marked = [item for item in items if "gpu" in item.keywords]
    if marked:
        import jax

        if jax.default_backend() != "gpu":
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU, but jax runs on {jax.default_backend()}"))


@pytest.fixture(autouse=True, scope="session")
def cache_of_programs(tmp_path_factory):
    """Programs that tests start keep what they compile in a folder of the tests, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled_by_tests")))
        yield


@pytest.fixture
def x64():
    """float64 arrays for the length of one test."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture
def quick_compiles():
    """Compiles without most optimisations: for tests of many small programs, each of which runs once."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
