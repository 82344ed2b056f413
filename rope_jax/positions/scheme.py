"""What a positional scheme is: the stage it is made for, the three things it may do, and the registry of all schemes."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from rope_jax.positions.grids import Grid
from rope_jax_kernels import Global, Neighborhood, Rotation, Window


@dataclasses.dataclass(frozen=True)
class Stage:
    """The part of a backbone that one scheme serves: layers of equal width on one map.

    Attributes:
        depth: number of attention layers.
        heads, head_dim, channels: of each layer; channels is the width of a token.
        grid: (rows, columns) of the map at creation, in tokens. Calls may use any other; parameters whose shape depends on it are
            resized by the scheme's own rule.
        pattern: what attends to what. Of a window the shift, and of a neighbourhood the dilation, may change from layer to layer.
        prefix: number of class and register tokens that stand before the map in attention.
        embed_prefix: how many of them are there already when `embed` is called (DeiT gives its class token a position, DeiT-III none).
        dtype: of parameters, coordinates and angles: float32, or float64.
    """

    depth: int
    heads: int
    head_dim: int
    channels: int
    grid: Grid
    pattern: Global | Window | Neighborhood = Global()
    prefix: int = 0
    embed_prefix: int = 0
    dtype: np.dtype = np.dtype(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerLayer:
    """Marks an array of `Terms` whose first axis is the layer; arrays without the mark are shared by all layers."""

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Terms:
    """What attention needs from a scheme, for all layers of a stage. Computed once per forward pass.

    Attributes:
        rotation: turns q and k; coordinates as `rope_jax_kernels.attention` takes them for the stage's pattern.
        bias: what is added to the scaled logits: a table of offsets as `attention` takes it for windows and neighbourhoods. With global
            attention the map is one window: a table [N, (2H-1)*(2W-1)] of query minus key, which three more entries may follow: those of
            queries that are prefix tokens, of keys that are, and of pairs of them. Or a matrix [N, L, L].
        add: [P + H*W, C], joins the normalised tokens before the projection to q, k, v.
        transform: for what the others cannot say. A pytree that is called with q, k, v [B, P + H*W, N, D] ([B, H, W, N, D] in windows and
            neighbourhoods) and `attend(q, k, v, bias=None)`, which attends with the other terms and one more bias; returns the output.
    """

    rotation: Rotation | None = None
    bias: Array | PerLayer | None = None
    add: Array | PerLayer | None = None
    transform: Callable | None = None

    def layer(self, index: int) -> "Terms":
        """The terms of one layer, without marks."""
        return self.with_layer([value[index] for value in self.per_layer()])

    def per_layer(self) -> list[Array]:
        """What differs from layer to layer, the layer being the first axis."""
        return [leaf.value for leaf in jax.tree.leaves(self, is_leaf=_is_marked) if _is_marked(leaf)]

    def with_layer(self, values: list[Array]) -> "Terms":
        """The terms of the layer whose share of `per_layer` is given."""
        values = iter(values)
        return jax.tree.map(lambda leaf: next(values) if _is_marked(leaf) else leaf, self, is_leaf=_is_marked)


def _is_marked(leaf: Any) -> bool:
    return isinstance(leaf, PerLayer)


class Position(nnx.Module):
    """Base of all schemes; by itself, the scheme `none`. A scheme overrides what it needs.

    Trainable arrays are `nnx.Param`s and say themselves whether the optimiser decays them: `nnx.Param(value, decay=False)`.
    Their first axis is the layers'; those that have none say `layers=False`.

    What a class says of its scheme with default options; a constructor sets on the instance what its options change:
        paper, equation: where it comes from, and what it does in one formula.
        acts: where, a key of `ACTS`.
        resolution: what becomes of it on a map of another size, a key of `RESOLUTION`.
        relative: what a key adds to a query depends on their offset only (and on what the two tokens contain).
        keeps_norms: queries and keys are as long as without it.
        per_head, per_layer: heads, layers differ in it.
        learnable: it has parameters.
        augments: it draws at random in training, which needs a key.
    """

    paper: ClassVar[str] = "thesis, table 4.1"
    equation: ClassVar[str] = "-"
    acts: ClassVar[str] = "nowhere"
    resolution: ClassVar[str] = "unchanged"
    relative: ClassVar[bool] = True
    keeps_norms: ClassVar[bool] = True
    per_head: ClassVar[bool] = False
    per_layer: ClassVar[bool] = False
    learnable: ClassVar[bool] = False
    augments: ClassVar[bool] = False

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs):
        self.stage = stage

    def embed(self, tokens: Array, grid: Grid, key: Array | None = None) -> Array:
        """Returns the tokens [B, embed_prefix + H*W, C] with what the scheme adds after the patch embedding."""
        return tokens

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """Returns what the layers' attention needs on a map of `grid`; `key` (training only) is for schemes that augment coordinates."""
        return Terms()

    def mix_after(self, depth: int) -> tuple[int, ...]:
        """The layers, of `depth`, after which `mix` does something; convolutional schemes have such."""
        return ()

    def mix(self, tokens: Array, grid: Grid, layer: int) -> Array:
        """Returns the tokens [B, P + H*W, C] that come out of a layer, with what the scheme does to them there."""
        return tokens

    def resize(self, grid: Grid) -> None:
        """Makes `grid` the map of creation, by resizing every parameter whose shape depends on it, by the scheme's own rule."""
        self.stage = dataclasses.replace(self.stage, grid=grid)


ACTS = {
    "nowhere": "nowhere",
    "tokens": "joins the tokens after the patch embedding",
    "rotation": "turns queries and keys",
    "logits": "joins the logits of attention",
    "layers": "joins the normalised tokens of every layer",
    "transform": "wraps the attention of every layer",
    "between": "joins the tokens between layers",
}

RESOLUTION = {
    "unchanged": "nothing in it knows the map",
    "extrapolate": "the same steps, beyond the range of training",
    "interpolate": "the same range, in smaller steps",
    "resample": "its table is resampled",
}


class Sum(Position):
    """Several schemes at once, written `a+b`: each adds to the tokens, and the terms are joined (Heo et al., section 4.1)."""

    def __init__(self, stage: Stage, parts: list[Position]):
        for acts, what in (
            ("rotation", "rotate q and k"),
            ("layers", "add to every layer's tokens"),
            ("transform", "wrap attention"),
        ):
            if sum(acts in part.acts for part in parts) > 1:
                raise ValueError(f"position combines several schemes that {what}; at most one of a sum may do so: remove the others")
        self.stage = stage
        self.parts = nnx.List(parts)
        for name, of in (
            ("relative", all),
            ("keeps_norms", all),
            ("per_head", any),
            ("per_layer", any),
            ("learnable", any),
            ("augments", any),
        ):
            setattr(self, name, of(getattr(part, name) for part in parts))

    def embed(self, tokens: Array, grid: Grid, key: Array | None = None) -> Array:
        """See `Position.embed`."""
        for part, part_key in zip(self.parts, _split(key, len(self.parts)), strict=True):
            tokens = part.embed(tokens, grid, part_key)
        return tokens

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        joined = Terms()
        for part, part_key in zip(self.parts, _split(key, len(self.parts)), strict=True):
            terms = part.terms(grid, part_key)
            joined = Terms(
                rotation=_join(joined.rotation, terms.rotation),
                bias=_join(joined.bias, terms.bias),
                add=_join(joined.add, terms.add),
                transform=_join(joined.transform, terms.transform),
            )
        return joined

    def mix_after(self, depth: int) -> tuple[int, ...]:
        """See `Position.mix_after`."""
        return tuple(layer for part in self.parts for layer in part.mix_after(depth))

    def mix(self, tokens: Array, grid: Grid, layer: int) -> Array:
        """See `Position.mix`."""
        for part in self.parts:
            tokens = part.mix(tokens, grid, layer)
        return tokens

    def resize(self, grid: Grid) -> None:
        """See `Position.resize`."""
        for part in self.parts:
            part.resize(grid)
        super().resize(grid)


def _split(key: Array | None, count: int) -> list[Array | None]:
    return [None] * count if key is None else list(jax.random.split(key, count))


def _join(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    per_layer = _is_marked(first) or _is_marked(second)
    first, second = (x.value if _is_marked(x) else x[None] for x in (first, second))
    # Of two tables, one may have no entries for prefix tokens: they are zero.
    entries = max(first.shape[-1], second.shape[-1])
    first, second = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, entries - x.shape[-1])]) for x in (first, second))
    return PerLayer(first + second) if per_layer else (first + second)[0]


_LARGEST = 1e30  # of a number in an option: its powers and products stay float32

SCHEMES: dict[str, type[Position]] = {"none": Position}


def scheme(name: str) -> Callable[[type[Position]], type[Position]]:
    """Class decorator that enters a scheme under `name`."""

    def enter(cls: type[Position]) -> type[Position]:
        if name in SCHEMES:
            raise ValueError(f"a positional scheme named {name!r} exists already: {SCHEMES[name].__qualname__}")
        SCHEMES[name] = cls
        return cls

    return enter


def check_option(name: str, value: Any, allowed: tuple) -> None:
    """Refuses a value of an option that is not among `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value} is not allowed; use one of {', '.join(map(str, allowed))}")


def check_finite(name: str, value: float, *, zero: bool = False) -> float:
    """Returns `value` as a float; refuses negative and infinite ones, and 0 unless `zero`."""
    if not 0 <= value <= _LARGEST or (value == 0 and not zero):
        raise ValueError(f"{name}={value} is not allowed; use a number {'of at least' if zero else 'above'} 0 and at most {_LARGEST:g}")
    return float(value)
