import subprocess
import sys

import jax
import pytest

from rope_jax.compilation import keep_compiled


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_cache_is_in_the_users_folder(no_cache):
    keep_compiled()
    assert jax.config.jax_compilation_cache_dir == str(no_cache / "cache" / "rope_jax" / "xla")
    assert (no_cache / "cache" / "rope_jax" / "xla").is_dir()


def test_another_folder_stays(no_cache):
    jax.config.update("jax_compilation_cache_dir", str(no_cache / "own"))
    keep_compiled()
    assert jax.config.jax_compilation_cache_dir == str(no_cache / "own")
    assert not (no_cache / "cache").exists()


def test_a_folder_that_cannot_be_made_is_no_error(no_cache):
    (no_cache / "cache").write_text("a file")
    keep_compiled()
    assert jax.config.jax_compilation_cache_dir is None


def test_programs_that_tests_start_write_elsewhere():
    """The suite must not fill its user's cache."""
    code = "import jax; from rope_jax.compilation import keep_compiled; keep_compiled(); print(jax.config.jax_compilation_cache_dir)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "compiled_by_tests" in told
