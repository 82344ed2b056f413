import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def compile_once(tmp_path_factory):
    """The same small steps are compiled by many tests: once is enough."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("xla")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
