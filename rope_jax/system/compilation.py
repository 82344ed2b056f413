"""The cache of compiled programs."""

import contextlib
import os

import jax

from rope_jax.system.files import cache_folder


def keep_compiled() -> None:
    """Enables jax's persistent compilation cache, in `xla` of the cache folder.

    The environment variables of jax take precedence: JAX_COMPILATION_CACHE_DIR sets another folder,
    JAX_ENABLE_COMPILATION_CACHE=false disables the cache. If the folder cannot be written, jax
    prints a warning and stores nothing.
    """
    if jax.config.jax_compilation_cache_dir is None:
        with contextlib.suppress(RuntimeError):  # a user without a home folder
            jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))


def compile_quickly() -> None:
    """Makes programs for a CPU compile in half of the time, and run slowly; before the first one.

    The older of XLA's two code generators for CPUs is the faster one to compile.
    """
    flag = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    jax.config.update("jax_disable_most_optimizations", True)
