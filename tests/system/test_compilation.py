import jax
import pytest

from rope_jax.system.compilation import keep_compiled
from rope_jax.system.files import cache_folder
from rope_jax_kernels.tuning import choices


@pytest.mark.parametrize("chosen", [None, "own"])
def test_programs_are_kept_in_the_cache_folder_unless_the_user_has_another(
    chosen, monkeypatch, tmp_path
):
    monkeypatch.setenv("ROPE_JAX_CACHE", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", chosen)
    try:
        keep_compiled()
        assert jax.config.jax_compilation_cache_dir == (chosen or str(tmp_path / "xla"))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_standalone_kernels_use_the_same_cache_folder(tmp_path, monkeypatch):
    for name in ("ROPE_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert choices.cache_folder() == cache_folder() / "kernels"
    for name in ("XDG_CACHE_HOME", "ROPE_JAX_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert choices.cache_folder() == cache_folder() / "kernels"
