"""Schemes that give position anew to every layer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.positions.absolute import Absolute, Learned
from rope_jax.positions.scheme import Grid, PerLayer, Position, Stage, Terms, check_option, scheme


@scheme("lape")
class LaPE(Position):
    """LaPE: layer-adaptive position embedding over any absolute one, `lape(ape)` (Yu et al., arXiv 2212.05262).

    Layer l normalises the embedding with a layer norm of its own, p <- LN_l(p), adds it to its normalised tokens before the
    projection to q, k, v, and hands it on. Nothing is added after the patch embedding. In a backbone of stages each stage has an
    embedding of its own, of its whole map. Of `cape` it takes the waves alone, on a map that training leaves as it is.

    Options:
        join: "lape"; or what the paper compares it with: "shared_norm", the same with one layer norm for all layers; "share", where the
            embedding is added to the tokens themselves before every layer; "unshare", which does so with another learned embedding for
            each layer (`lape(ape,join=unshare)`).
    """

    paper = "Yu et al., arXiv 2212.05262"
    equation = "p = LN_l(p), attention of LN(tokens) + p"
    acts = "layers"
    resolution = "resample"  # here and in `learnable` with ape inside
    relative = keeps_norms = False
    per_layer = learnable = True

    def __init__(self, stage: Stage, inner: Position, *, rngs: nnx.Rngs, join: str = "lape"):
        super().__init__(stage, rngs=rngs)
        check_option("join", join, ("lape", "shared_norm", "share", "unshare"))
        if not isinstance(inner, Absolute):
            raise ValueError("lape(...) wraps one absolute embedding: ape, sincos1d, sincos2d, gpe or cape")
        if join == "unshare" and not isinstance(inner, Learned):
            raise ValueError("join=unshare learns an embedding for each layer: use lape(ape,join=unshare), or join=share")
        self.join, self.inner = join, inner
        self.resolution = inner.resolution
        if join in ("share", "unshare"):
            self.acts, self.per_layer, self.learnable = "between", join == "unshare", inner.learnable
            self.later = nnx.List(inner.another(rngs) for _ in range(stage.depth - 1)) if join == "unshare" else nnx.List([])
            return
        shape = (stage.depth, stage.channels) if join == "lape" else (stage.channels,)
        self.scale = nnx.Param(jnp.ones(shape, stage.dtype), decay=False)
        self.bias = nnx.Param(jnp.zeros(shape, stage.dtype), decay=False)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        if self.acts == "between":
            return Terms()

        def layer(p: Array, affine: tuple[Array, Array]) -> tuple[Array, Array]:
            p = jax.nn.standardize(p, axis=-1, epsilon=1e-6) * affine[0] + affine[1]
            return p, p

        scale, bias = (jnp.broadcast_to(x[...], (self.stage.depth, self.stage.channels)) for x in (self.scale, self.bias))
        return Terms(add=PerLayer(jax.lax.scan(layer, self._table(self.inner, grid), (scale, bias))[1]))

    def _table(self, inner: Position, grid: Grid) -> Float[Array, "L C"]:
        """An embedding with a row for every token of attention: zero for prefix tokens that take no part in it, behind those that do."""
        rows, embedded = inner.table(grid), self.stage.embed_prefix
        others = jnp.zeros((self.stage.prefix - embedded, self.stage.channels), rows.dtype)
        return jnp.concatenate([rows[:embedded], others, rows[embedded:]])

    def embed(self, tokens: Array, grid: Grid, key: Array | None = None) -> Array:
        """See `Position.embed`."""
        return tokens + self.inner.table(grid).astype(tokens.dtype) if self.acts == "between" else tokens

    def mix_after(self, depth: int) -> tuple[int, ...]:
        """See `Position.mix_after`."""
        return tuple(range(depth - 1)) if self.acts == "between" else ()

    def mix(self, tokens: Array, grid: Grid, layer: int) -> Array:
        """See `Position.mix`: what is added before a layer joins the tokens behind the one before."""
        if layer not in self.mix_after(self.stage.depth):
            return tokens
        inner = self.later[layer] if self.later else self.inner
        return tokens + self._table(inner, grid).astype(tokens.dtype)

    def resize(self, grid: Grid) -> None:
        """See `Position.resize`."""
        for inner in (self.inner, *(self.later if self.acts == "between" else ())):
            inner.resize(grid)
        super().resize(grid)
