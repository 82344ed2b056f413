import os
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from rope_jax.compilation import _Checked, keep_compiled
from rope_jax.files import cache_folder


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("ROPE_JAX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_cache_is_in_the_users_folder(no_cache):
    keep_compiled()
    assert jax.config.jax_compilation_cache_dir == str(no_cache / "cache" / "rope_jax" / "xla")
    assert (no_cache / "cache" / "rope_jax" / "xla").is_dir()


def test_the_cache_follows_the_cache_folder(no_cache, monkeypatch):
    monkeypatch.setenv("ROPE_JAX_CACHE", str(no_cache / "chosen"))
    keep_compiled()
    assert jax.config.jax_compilation_cache_dir == str(no_cache / "chosen" / "xla")


def test_another_folder_stays(no_cache):
    jax.config.update("jax_compilation_cache_dir", str(no_cache / "own"))
    keep_compiled()
    assert jax.config.jax_compilation_cache_dir == str(no_cache / "own")
    assert not (no_cache / "cache").exists()


def test_a_folder_that_cannot_be_made_is_no_error(no_cache):
    (no_cache / "cache").write_text("a file")
    keep_compiled()
    assert jax.config.jax_compilation_cache_dir is None


def test_tests_do_not_fill_the_users_cache():
    """Neither in this process, nor in those that it starts."""
    folder = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder != cache_folder() / "xla"


def test_a_damaged_entry_is_compiled_anew(tmp_path, monkeypatch):
    """As the tests need it that share a folder: with a warning that is no error."""
    settings = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir",)}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    try:
        function = jax.jit(lambda x: x * 2 + 12345)
        for _ in range(2):
            assert function(jnp.ones(())) == 12347
            function.clear_cache()
            (entry,) = tmp_path.glob("*lambda*-cache")
            entry.write_bytes(entry.read_bytes()[:-10])
    finally:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_a_swapped_entry_is_compiled_anew(tmp_path):
    """Under its name is another program of the same arguments, which would run unnoticed."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    keep_compiled()
    compilation_cache.reset_cache()

    def results():
        functions = [jax.jit(lambda x: x * 2 + 54321), jax.jit(lambda x: x * 3 + 54321)]
        found = [float(function(jnp.ones(()))) for function in functions]
        for function in functions:
            function.clear_cache()
        return found

    try:
        assert results() == [54323, 54324]
        first, second = tmp_path.glob("*lambda*-cache")
        for name in ("-cache", "-sha256"):  # both files of each entry, or the programs alone
            paths = [path.with_name(path.name.replace("-cache", name)) for path in (first, second)]
            one, other = (path.read_bytes() for path in paths)
            for path, content in zip(paths, (other, one), strict=True):
                path.write_bytes(content)
            assert results() == [54323, 54324]
        entries = [path.read_bytes() for path in (first, second)]
        assert results() == [54323, 54324]
        assert [path.read_bytes() for path in (first, second)] == entries  # they are used again
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def test_an_entry_has_its_digest_before_it_appears(tmp_path):
    """Another process that reads it at that moment would delete it."""

    class Folder:
        def get(self, key):
            path = tmp_path / f"{key}-cache"
            return path.read_bytes() if path.exists() else None

        def put(self, key, value):
            (tmp_path / f"{key}-cache").write_bytes(value)
            assert another.get(key) == value

    cache, another = (_Checked(Folder(), str(tmp_path)) for _ in range(2))
    assert cache.get("a") is None
    cache.put("a", b"program")
    cache.put("a", b"the same, compiled by a slower process")
    assert another.get("a") == b"program"
