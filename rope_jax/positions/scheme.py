"""The base class of all positional schemes, the terms they return, and the registry of names."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.names.options import Range
from rope_jax.names.registry import Registry
from rope_jax.positions.extension import Extension
from rope_jax.positions.grids import Grid, Video
from rope_jax_kernels import Global, Neighborhood, Rotation, Window

Tokens = Float[Array, "B L C"]

# Options of schemes; powers and products of them stay within float32.
Scale = Annotated[float, Range(above=0, high=1e30)]
Spread = Annotated[float, Range(low=0, high=1e30)]
Stretch = Annotated[float, Range(low=1, high=1e30)]


@dataclasses.dataclass(frozen=True)
class Stage:
    """The layers of a backbone that share one scheme: equally wide, on one map.

    >>> from rope_jax.positions import Stage
    >>> Stage(depth=12, heads=6, head_dim=64, channels=384, grid=(14, 14), prefix=1).grid
    (14, 14)

    Attributes:
        depth: number of attention layers.
        heads: number of heads per layer.
        head_dim: channels per head.
        channels: width of a token.
        grid: (rows, columns) of the map at creation, in tokens. A call may use any other grid;
            parameters whose shape depends on it are resized by the scheme's own rule.
        pattern: which keys a query attends to. A window's shift and a neighbourhood's dilation may
            differ between layers.
        global_layers: the layers of an isotropic backbone with windows that attend to the whole map
            instead (`Position.with_pattern`); None in all other backbones.
        window_box: the box of schemes with box coordinates in windows: the "map", so that tokens of
            a window are spaced as on the map, or each window's "own" box.
        prefix: number of class and register tokens before the map in attention.
        embed_prefix: number of these that are present when `embed` is called (DeiT adds a position
            to its class token, DeiT-III does not).
        dtype: of parameters, coordinates and angles: float32 or float64.
    """

    depth: int
    heads: int
    head_dim: int
    channels: int
    grid: Grid
    pattern: Global | Window | Neighborhood = Global()
    global_layers: tuple[int, ...] | None = None
    window_box: str = "map"
    prefix: int = 0
    embed_prefix: int = 0
    dtype: np.dtype = np.dtype(np.float32)

    def region(self, grid: Grid | Video) -> Grid | Video:
        """Rows and columns of the region of a map that contains one query's keys."""
        if isinstance(self.pattern, Window):
            return self.pattern.fit(grid).size
        return self.pattern.size if isinstance(self.pattern, Neighborhood) else grid


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerLayer:
    """Marks an array in `Terms` as stacked over layers; all layers share unmarked arrays.

    >>> import jax.numpy as jnp
    >>> from rope_jax.positions import PerLayer, Terms
    >>> Terms(bias=PerLayer(jnp.zeros((12, 6, 729)))).layer(0).bias.shape
    (6, 729)
    """

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Terms:
    """A scheme's contribution to the attention of a stage, computed once per forward pass.

    >>> from flax import nnx
    >>> from rope_jax.positions import Stage, create_position
    >>> stage = Stage(depth=2, heads=3, head_dim=16, channels=48, grid=(4, 5))
    >>> terms = create_position("axial_rope", stage, rngs=nnx.Rngs(0)).terms((4, 5))
    >>> terms.layer(1).rotation.coords.shape, terms.bias
    ((20, 2), None)

    Attributes:
        rotation: of q and k, with coordinates as `rope_jax_kernels.attention` takes them for the
            stage's pattern.
        bias: added to the scaled logits. In windows and neighbourhoods, a table of offsets as
            `attention` takes it. In global attention, a table [N, (2H-1)*(2W-1)] of query minus key
            (the map is one window), or a matrix [N, L, L]. The table may have three more entries:
            for prefix queries, for prefix keys, and for pairs of prefix tokens.
        add: [P + H*W, C], added to the normalised tokens before the projection to q, k and v.
        transform: anything else. A pytree called with q, k, v [B, P + H*W, N, D] ([B, H, W, N, D]
            in windows and neighbourhoods) and `attend(q, k, v, bias=None)`, which computes
            attention with the other terms and an additional bias, in global attention [N, L, L] or
            [B, N, L, L]; it returns the output of attention.
        logit_scale: a factor on the logits before the bias, in addition to head_dim**-0.5.
    """

    rotation: Rotation | None = None
    bias: Array | PerLayer | None = None
    add: Array | PerLayer | None = None
    transform: Callable | None = None
    logit_scale: float = dataclasses.field(default=1.0, metadata={"static": True})

    def layer(self, index: int) -> "Terms":
        """Returns the terms of one layer, without `PerLayer`."""
        return self.with_layer([value[index] for value in self.per_layer()])

    def per_layer(self) -> list[Array]:
        """Returns the arrays stacked over layers, first axis the layer."""
        leaves = jax.tree.leaves(self, is_leaf=_is_marked)
        return [leaf.value for leaf in leaves if _is_marked(leaf)]

    def with_layer(self, values: list[Array]) -> "Terms":
        """Returns the terms of one layer, given its slices of the arrays of `per_layer`."""
        slices = iter(values)
        leaves, tree = jax.tree.flatten(self, is_leaf=_is_marked)
        return tree.unflatten([next(slices) if _is_marked(leaf) else leaf for leaf in leaves])


def _is_marked(leaf: Any) -> bool:
    return isinstance(leaf, PerLayer)


class Position(nnx.Module):
    """Base of all schemes, which override what they need; itself the scheme `none`.

    >>> from flax import nnx
    >>> from rope_jax.positions import Stage, create_position
    >>> stage = Stage(depth=2, heads=3, head_dim=16, channels=48, grid=(4, 5))
    >>> position = create_position("rpb", stage, rngs=nnx.Rngs(0))
    >>> position.acts, position.resolution, position.relative
    ('logits', 'resample', True)

    The keyword-only parameters of the constructor are the scheme's options, with their types.
    Trainable arrays are of type `nnx.Param`; `nnx.Param(value, decay=False)` is not decayed. The
    first axis of a parameter is the layer's, or it is marked `layers=False`.

    Class attributes describe the scheme with default options; constructors override them on the
    instance if options change them. Tests measure all of these:

    Attributes:
        paper: the scheme's source.
        equation: the scheme in one formula.
        acts: where it acts, a key of `ACTS`.
        resolution: the rule for a map of another size, a key of `RESOLUTION`.
        relative: a key's contribution to a query depends on their offset only (and on the contents
            of the two tokens). Rotary schemes that are not relative must declare it: in windows,
            they rotate q and k on the whole map.
        keeps_norms: the lengths of queries and keys do not change.
        per_head: heads differ.
        per_layer: layers differ.
        learnable: the scheme has parameters.
        augments: the scheme draws random numbers in training, which needs a key.
        wraps: the scheme wraps another one, as in `lape(ape)`.
        within_windows: a transform of its terms sees windows only, not the whole map.
        shrink: how its bias table is resampled to a smaller map; None for schemes without one.
        extension: how its rotation extends to other grid sizes; None for schemes without
            one. Its fields are options of the scheme, besides those of the constructor.
        of_training: attributes that describe the training grid, from which the scheme extends.
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
    wraps: ClassVar[bool] = False
    within_windows: ClassVar[bool] = False
    of_training: ClassVar[tuple[str, ...]] = ()
    shrink: str | None = None
    extension: Extension | None = None

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs):
        self.stage = stage

    def schemes(self) -> list["Position"]:
        """Returns the parts of a combination `a+b`; of any other scheme, the scheme itself."""
        return [self]

    @property
    def wraps_attention(self) -> bool:
        """True if `terms` has a transform in the stage's pattern of attention."""
        return self.acts == "transform"

    def embed(self, tokens: Tokens, grid: Grid, key: Array | None = None) -> Tokens:
        """Adds the scheme's embedding after the patch embedding.

        Args:
            tokens: T = embed_prefix + H*W.
            grid: (H, W) in tokens.
            key: in training, for schemes that augment coordinates.
        """
        return tokens

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """Returns the terms for attention on a map of `grid`; arguments as in `embed`."""
        return Terms()

    def mix_after(self, depth: int) -> tuple[int, ...]:
        """Returns the layers, of `depth`, after which `mix` changes the tokens."""
        return ()

    def mix(self, tokens: Tokens, grid: Grid, layer: int) -> Tokens:
        """Changes the tokens after a layer; L = P + H*W."""
        return tokens

    def with_pattern(self, pattern: Global | Window | Neighborhood) -> "Position":
        """Returns the scheme, with its parameters, for layers of another kind of attention pattern.

        That is the scheme itself for windows of another shift and neighbourhoods of another
        dilation.
        """
        if isinstance(self.stage.pattern, type(pattern)):  # `SwinWindow.fit` returns a plain one
            return self
        other = nnx.merge(*nnx.split(self))
        for _, module in nnx.iter_modules(other):
            if isinstance(module, Position):
                module.stage = dataclasses.replace(module.stage, pattern=pattern)
        return other

    def resize(self, grid: Grid) -> None:
        """Sets the map of creation to `grid`, and resamples parameters that depend on it."""
        self.stage = dataclasses.replace(self.stage, grid=grid)


ACTS = {
    "nowhere": "nowhere",
    "tokens": "added to the tokens after the patch embedding",
    "rotation": "rotates queries and keys",
    "logits": "added to the attention logits",
    "layers": "added to the normalised tokens of every layer",
    "transform": "wraps the attention of every layer",
    "between": "added to the tokens between layers",
}

RESOLUTION = {
    "unchanged": "independent of the size",
    "extrapolate": "extrapolated: the same step per patch",
    "interpolate": "interpolated: the same range, smaller steps",
    "resample": "interpolated: its table is resampled",
}

_ONCE = {"rotation": "rotate q and k", "layers": "add to every layer's tokens"}


class Combined(Position):
    """Several schemes at once, written `a+b`; embeddings and biases add up.

    At most one part may rotate, one may add to every layer, and one may wrap attention (Heo et al.,
    section 4.1).
    """

    def __init__(self, stage: Stage, parts: Sequence[Position]):
        for acts, action in _ONCE.items():
            if sum(part.acts == acts for part in parts) > 1:
                raise ValueError(
                    f"position combines several schemes that {action}; at most one of a sum may do "
                    "so: remove the others"
                )
        if sum(part.wraps_attention for part in parts) > 1:
            raise ValueError(
                "position combines several schemes that wrap attention (in windows, rotary "
                "schemes that are not relative do so): remove one, or use a model without "
                "windows"
            )
        self.stage = stage
        self.parts = nnx.List(parts)
        self.relative = all(part.relative for part in parts)
        self.keeps_norms = all(part.keeps_norms for part in parts)
        self.per_head = any(part.per_head for part in parts)
        self.per_layer = any(part.per_layer for part in parts)
        self.learnable = any(part.learnable for part in parts)
        self.augments = any(part.augments for part in parts)

    def schemes(self) -> list[Position]:
        return list(self.parts)

    def embed(self, tokens: Tokens, grid: Grid, key: Array | None = None) -> Tokens:
        for part, part_key in self._split_key(key):
            tokens = part.embed(tokens, grid, part_key)
        return tokens

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        combined = Terms()
        for part, part_key in self._split_key(key):
            terms = part.terms(grid, part_key)
            combined = Terms(
                rotation=combined.rotation or terms.rotation,
                bias=_add(combined.bias, terms.bias),
                add=_add(combined.add, terms.add),
                transform=combined.transform or terms.transform,
                logit_scale=combined.logit_scale * terms.logit_scale,
            )
        return combined

    def mix_after(self, depth: int) -> tuple[int, ...]:
        return tuple(layer for part in self.parts for layer in part.mix_after(depth))

    def mix(self, tokens: Tokens, grid: Grid, layer: int) -> Tokens:
        for part in self.parts:
            tokens = part.mix(tokens, grid, layer)
        return tokens

    def resize(self, grid: Grid) -> None:
        for part in self.parts:
            part.resize(grid)
        super().resize(grid)

    def _split_key(self, key: Array | None) -> Iterable[tuple[Position, Array | None]]:
        count = len(self.parts)
        keys = [None] * count if key is None else jax.random.split(key, count)
        return zip(self.parts, keys, strict=True)


def _add(first: Array | PerLayer | None, second: Array | PerLayer | None) -> Any:
    if first is None or second is None:
        return second if first is None else first
    per_layer = _is_marked(first) or _is_marked(second)
    first, second = (x.value if _is_marked(x) else x[None] for x in (first, second))
    if first.ndim != second.ndim:
        raise ValueError("position adds a matrix of biases to a table of offsets: use one of them")
    # A table without entries for prefix tokens has zeros there.
    entries = max(first.shape[-1], second.shape[-1])
    first, second = (
        jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, entries - x.shape[-1])]) for x in (first, second)
    )
    return PerLayer(first + second) if per_layer else (first + second)[0]


_ELSEWHERE = {  # names in papers and other libraries -> here
    "rope": "rope2d",
    "rope_axial": "rope2d",  # of Heo et al.; the thesis' axial RoPE is axial_rope
    "learn": "ape",
    "learned": "ape",
    "absolute": "ape",
    "sincos": "sincos2d",
    "rel_pos_bias": "rpb",
    "alibi": "alibi2d",
    "cpvt": "peg",
}
SCHEMES: Registry[type[Position]] = Registry(
    "positional scheme",
    {"none": Position},
    elsewhere={name: f"here it is {here!r}" for name, here in _ELSEWHERE.items()}.get,
    listed_by="rope_jax.list_positions()",
)


def scheme(name: str) -> Callable[[type[Position]], type[Position]]:
    """Class decorator that registers a scheme under `name`.

    >>> from rope_jax.positions.absolute import Absolute
    >>> @scheme("constant")
    ... class Constant(Absolute):
    ...     def table(self, grid):
    ...         tokens = self.stage.embed_prefix + grid[0] * grid[1]
    ...         return jax.numpy.ones((tokens, self.stage.channels))
    >>> SCHEMES.pop("constant").__name__  # in this example only
    'Constant'

    Args:
        name: for the notation, `name(option=value)`; see `Position` for the class.

    Raises:
        ValueError: a scheme of this name exists, or the name is not an identifier.
    """

    def register(cls: type[Position]) -> type[Position]:
        SCHEMES.register(name, cls)
        return cls

    return register


def advice_for_heads(option: str, values: Sequence[int]) -> str:
    """Advice for a head dimension that does not fit: values of an option that would."""
    fits = f"{option} of {' or '.join(map(str, values))}, or " if values else ""
    return f"use {fits}a model with another width or number of heads"
