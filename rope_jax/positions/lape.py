"""LaPE: an absolute embedding with a layer norm of its own in every layer."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.positions.absolute import Absolute, Learned
from rope_jax.positions.batch import add
from rope_jax.positions.scheme import (
    Grid,
    PerLayer,
    Position,
    Stage,
    Terms,
    Tokens,
    scheme,
)


@scheme("lape")
class LaPE(Position):
    """Layer-adaptive position embedding over an absolute one, `lape(ape)` (arXiv 2212.05262).

    Layer l normalises the embedding with its own layer norm, p <- LN_l(p), adds it to its
    normalised tokens before the projection to q, k and v, and passes it on. Nothing is added after
    the patch embedding. In a hierarchical backbone each stage has its own embedding of its whole
    map. With `cape`, only the waves are used, without augmentation.

    Options:
        join: "lape", or one of the baselines of the paper: "shared_norm", with one layer norm for
            all layers; "share", which adds the embedding to the tokens themselves before every
            layer; "unshare", which does so with another learned embedding for each layer
            (`lape(ape,join=unshare)`).
    """

    paper = "Yu et al., arXiv 2212.05262"
    equation = "p = LN_l(p), attention of LN(tokens) + p"
    acts = "layers"
    resolution = "resample"  # here and in `learnable` with ape inside
    relative = keeps_norms = False
    per_layer = learnable = True
    wraps = True

    def __init__(
        self,
        stage: Stage,
        inner: Position,
        *,
        rngs: nnx.Rngs,
        join: Literal["lape", "shared_norm", "share", "unshare"] = "lape",
    ):
        super().__init__(stage, rngs=rngs)
        self.join = join
        if not isinstance(inner, Absolute):
            raise ValueError(
                "lape(...) wraps one absolute embedding: ape, sincos1d, sincos2d, gpe or cape"
            )
        if join == "unshare" and not isinstance(inner, Learned):
            raise ValueError(
                "join=unshare learns an embedding for each layer: use lape(ape,join=unshare), or "
                "join=share"
            )
        self.inner, self.resolution = inner, inner.resolution
        if join in ("share", "unshare"):
            self.acts, self.per_layer, self.learnable = "between", False, inner.learnable
            self.later = nnx.List([])
            if join == "unshare":
                self.per_layer = True
                self.later = nnx.List(inner.another(rngs) for _ in range(stage.depth - 1))
            return
        shape = (stage.depth, stage.channels) if join == "lape" else (stage.channels,)
        declared = {"decay": False} if join == "lape" else {"decay": False, "layers": False}
        self.scale = nnx.Param(jnp.ones(shape, stage.dtype), **declared)
        self.bias = nnx.Param(jnp.zeros(shape, stage.dtype), **declared)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        if self.acts == "between":
            return Terms()

        def layer(p: Array, affine: tuple[Array, Array]) -> tuple[Array, Array]:
            p = jax.nn.standardize(p, axis=-1, epsilon=1e-6) * affine[0] + affine[1]
            return p, p

        shape = (self.stage.depth, self.stage.channels)
        affine = tuple(jnp.broadcast_to(x[...], shape) for x in (self.scale, self.bias))
        return Terms(add=PerLayer(jax.lax.scan(layer, self._rows(self.inner, grid), affine)[1]))

    def _rows(self, inner: Absolute, grid: Grid) -> Float[Array, "L C"]:
        """An embedding's rows for all tokens of attention; zeros for prefix tokens without one."""
        rows, embedded = inner.table(grid), self.stage.embed_prefix
        others = jnp.zeros((self.stage.prefix - embedded, self.stage.channels), rows.dtype)
        return jnp.concatenate([rows[:embedded], others, rows[embedded:]])

    def embed(self, tokens: Tokens, grid: Grid, key: Array | None = None) -> Tokens:
        if self.acts != "between":
            return tokens
        return add(tokens, self.inner.table(grid))

    def mix_after(self, depth: int) -> tuple[int, ...]:
        return tuple(range(depth - 1)) if self.acts == "between" else ()

    def mix(self, tokens: Tokens, grid: Grid, layer: int) -> Tokens:
        # Adding an embedding before a layer is adding it after the previous one.
        if layer not in self.mix_after(self.stage.depth):
            return tokens
        inner = self.later[layer] if self.later else self.inner
        return add(tokens, self._rows(inner, grid))

    def resize(self, grid: Grid) -> None:
        for inner in (self.inner, *(self.later if self.acts == "between" else ())):
            inner.resize(grid)
        super().resize(grid)
