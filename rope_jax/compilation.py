"""The cache of compiled programs, with a digest of each entry.

jax runs whatever program it finds under a name. Where a file was swapped or damaged, that is
another program, or none: here such an entry counts as missing, and the program is compiled.
"""

import contextlib
import hashlib
import pathlib
from typing import Any

import jax

from rope_jax.files import cache_folder, read_regular, write_file

_LARGEST = 1000  # bytes of a digest's file


def keep_compiled() -> None:
    """Enables jax's persistent compilation cache, in `xla` of the cache folder.

    The environment variables of jax take precedence: JAX_COMPILATION_CACHE_DIR sets another folder,
    JAX_ENABLE_COMPILATION_CACHE=false disables the cache. Without a writable folder there is no
    cache. Entries without a digest, as other programs write them, are compiled again.
    """
    _check_entries()
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = cache_folder() / "xla"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home folder
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))


class _Checked:
    """A cache of jax in a folder, with a file KEY-sha256 beside each entry.

    The digest is of the key and the content, so that an entry does not pass under another key.
    """

    def __init__(self, cache: Any, folder: str):
        self._cache, self._folder = cache, pathlib.Path(folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def get(self, key: str) -> bytes | None:
        """The content of an entry; None without one that was written under this key."""
        value = self._cache.get(key)
        if value is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            if read_regular(self._seal(key), at_most=_LARGEST).decode() == _digest(key, value):
                return value
        self._entry(key).unlink(missing_ok=True)  # jax replaces no entry
        return None

    def put(self, key: str, value: bytes) -> None:
        """Adds an entry, unless another process did so in the meantime."""
        if self._entry(key).exists():
            return
        # First the digest: other processes delete entries without one.
        write_file(self._seal(key), _digest(key, value))
        self._cache.put(key, value)

    def _entry(self, key: str) -> pathlib.Path:
        return self._folder / f"{key}-cache"

    def _seal(self, key: str) -> pathlib.Path:
        return self._folder / f"{key}-sha256"


def _digest(key: str, value: bytes) -> str:
    return hashlib.sha256(key.encode() + b"\0" + value).hexdigest()


def _check_entries() -> None:
    """Makes jax check the entries of its cache, once; other versions of jax stay as they are."""
    try:
        from jax._src import compilation_cache

        opened = compilation_cache.get_file_cache
    except (ImportError, AttributeError):
        return
    if hasattr(opened, "without_checks"):
        return

    def get_file_cache(path: str) -> tuple[Any, str] | None:
        found = opened(path)
        if found is None or "://" in path:  # a remote folder
            return found
        return _Checked(found[0], path), path

    get_file_cache.without_checks = opened
    compilation_cache.get_file_cache = get_file_cache
