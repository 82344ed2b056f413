"""The documented functions of `rope_jax.system.sharding`, under their former name."""

from rope_jax.system.sharding import make_mesh, put_batch, state_shardings, use_mesh

__all__ = ["make_mesh", "put_batch", "state_shardings", "use_mesh"]
