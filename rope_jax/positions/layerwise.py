"""Schemes that give position anew to every layer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from rope_jax.positions.absolute import Absolute
from rope_jax.positions.scheme import Grid, PerLayer, Position, Stage, Terms, scheme


@scheme("lape")
class LaPE(Position):
    """LaPE: layer-adaptive position embedding over any absolute one, `lape(ape)` (Yu et al., arXiv 2212.05262).

    Layer l normalises the embedding with a layer norm of its own, p <- LN_l(p), adds it to its normalised tokens before the
    projection to q, k, v, and hands it on. Nothing is added after the patch embedding.
    """

    acts = "layers"

    def __init__(self, stage: Stage, inner: Position, *, rngs: nnx.Rngs):
        super().__init__(stage, rngs=rngs)
        if not isinstance(inner, Absolute):
            raise ValueError("lape(...) wraps one absolute embedding: ape, sincos1d or sincos2d")
        self.inner = inner
        shape = (stage.depth, stage.channels)
        self.scale = nnx.Param(jnp.ones(shape, stage.dtype), decay=False)
        self.bias = nnx.Param(jnp.zeros(shape, stage.dtype), decay=False)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        stage = self.stage
        table = self.inner.table(grid)
        table = jnp.concatenate([jnp.zeros((stage.prefix - stage.embed_prefix, stage.channels), table.dtype), table])

        def layer(p: Array, affine: tuple[Array, Array]) -> tuple[Array, Array]:
            p = jax.nn.standardize(p, axis=-1, epsilon=1e-6) * affine[0] + affine[1]
            return p, p

        return Terms(add=PerLayer(jax.lax.scan(layer, table, (self.scale[...], self.bias[...]))[1]))

    def resize(self, grid: Grid) -> None:
        """See `Position.resize`."""
        self.inner.resize(grid)
        super().resize(grid)
