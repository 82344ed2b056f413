"""The cache folder of measured choices, and the names of its files."""

import functools
import hashlib
import os
import pathlib
import re


def cache_folder() -> pathlib.Path:
    """The folder of remembered choices: `kernels` in $ROPE_JAX_CACHE, else in rope_jax of
    $XDG_CACHE_HOME or ~/.cache.

    Raises:
        RuntimeError: neither variable is set and the user has no home folder.
    """
    if chosen := os.environ.get("ROPE_JAX_CACHE"):
        return pathlib.Path(chosen) / "kernels"
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(caches, "rope_jax", "kernels")


@functools.cache
def sources_of_kernels() -> str:
    """A short hash of this package's sources: what was measured with others no longer holds."""
    folder, digest = pathlib.Path(__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def file_name(kind: str, version: str, sources: str) -> str:
    """The file of a kind of device, a version of jax and of the kernels, in either folder.

    >>> file_name("NVIDIA H200", "0.11.2", "0a1b2c3d")
    'nvidia_h200-jax0.11.2-0a1b2c3d.json'
    """
    return f"{word_of(kind)}-jax{version}-{sources}.json"


def word_of(kind: str) -> str:
    """A kind of device in names of files.

    >>> word_of("NVIDIA H200")
    'nvidia_h200'
    """
    return re.sub("[^a-z0-9]+", "_", kind.lower())
