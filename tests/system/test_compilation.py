import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from rope_jax.system.compilation import keep_compiled
from rope_jax.system.files import cache_folder
from rope_jax_kernels.tuning import choices


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ROPE_JAX_CACHE", str(tmp_path / "chosen"))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_programs_are_cached_and_read_again(no_cache):
    keep_compiled()
    function = jax.jit(lambda x: x * 2 + 12345)
    for _ in range(2):
        assert function(jnp.ones(())) == 12347
        function.clear_cache()
        (entry,) = (no_cache / "chosen" / "xla").glob("*lambda*-cache")
        entry.write_bytes(entry.read_bytes()[:-10])  # a damaged entry is compiled again


def test_other_cache_folders_are_kept(no_cache):
    jax.config.update("jax_compilation_cache_dir", str(no_cache / "own"))
    keep_compiled()
    assert jax.config.jax_compilation_cache_dir == str(no_cache / "own")


def test_unusable_cache_folders_are_tolerated(no_cache):
    (no_cache / "chosen").write_text("a file")
    keep_compiled()
    assert jax.jit(lambda x: x * 3 + 12345)(jnp.ones(())) == 12348


def test_standalone_kernels_use_the_same_cache_folder(tmp_path, monkeypatch):
    for name in ("ROPE_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert choices.cache_folder() == cache_folder() / "kernels"
    for name in ("XDG_CACHE_HOME", "ROPE_JAX_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert choices.cache_folder() == cache_folder() / "kernels"
