"""Compiled programs kept between runs, so that a run that is resumed, or started again, compiles nothing twice."""

import os
import pathlib

import jax


def keep_compiled() -> None:
    """Turns jax's persistent cache on, in `rope_jax/xla` of the user's cache folder (XDG_CACHE_HOME, or ~/.cache).

    The environment variables of jax go before: JAX_COMPILATION_CACHE_DIR names another folder, JAX_ENABLE_COMPILATION_CACHE=false switches
    it off. Where the folder cannot be made there is no cache.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "rope_jax" / "xla"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
