"""The documented function of `rope_jax.system.cores`, under its former name."""

from rope_jax.system.cores import keep_freed_memory

__all__ = ["keep_freed_memory"]
