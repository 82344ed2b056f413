"""Position from depthwise 3 x 3 convolutions and the zero padding around a map."""

import dataclasses
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.names.options import Range, convert
from rope_jax.positions import grids
from rope_jax.positions.absolute import Absolute, check_channels, interleaved_waves
from rope_jax.positions.initializers import normal_init
from rope_jax.positions.scheme import (
    Grid,
    PerLayer,
    Position,
    Scale,
    Stage,
    Terms,
    Tokens,
    scheme,
)


def depthwise(
    maps: Float[Array, "B H W *C"], kernel: Float[Array, "3 3 D"], bias: Float[Array, " D"]
) -> Float[Array, "B H W *C"]:
    """Convolves each channel with its own 3 x 3 kernel, zeros around the map.

    A sum of nine shifted maps, which XLA fuses into one pass over memory: its grouped convolutions
    are slow, and their gradients slower. It is computed in the kernel's precision.

    Args:
        maps: the last axis holds D channels; axes between it and the map share the kernel.
        kernel: [y, x, channel].
        bias: added to every token.

    Returns:
        Maps of the same shape and dtype.
    """
    height, width = maps.shape[1:3]
    margins = [(0, 0), (1, 1), (1, 1)] + [(0, 0)] * (maps.ndim - 3)
    padded = jnp.pad(maps, margins).astype(kernel.dtype)
    shifted = (
        padded[:, y : y + height, x : x + width] * kernel[y, x] for y in range(3) for x in range(3)
    )
    return (sum(shifted) + bias).astype(maps.dtype)


@scheme("gpe")
class GlobalEmbedding(Absolute):
    """ResFormer's global embedding: sines and cosines, smoothed by a learned depthwise convolution.

    The first half of the channels encodes the row, (i + 1) / H * 2 pi, the second half the column,
    with alternating sines and cosines; prefix tokens get zeros (arXiv 2212.00776).

    Options:
        base: of the frequencies base**(-2i / (C/2)), 10000.
    """

    paper = "Tian et al., arXiv 2212.00776"
    equation = "tokens + DWConv(sin, cos of 2 pi y f and 2 pi x f), (x, y) in (0, 1]"
    resolution = "interpolate"
    learnable = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, base: Scale = 10000.0):
        super().__init__(stage, rngs=rngs)
        check_channels(stage, 4)
        self.base = base

        def draw(*shape: int) -> nnx.Param:  # torch's initial weights of a convolution
            start = jax.random.uniform(rngs.params(), shape, stage.dtype, -1 / 3, 1 / 3)
            return nnx.Param(start, decay=False, layers=False)

        self.kernel = draw(3, 3, stage.channels)
        self.bias = draw(stage.channels)

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        y, x = ((grids.absolute(grid) + 1) / grid * 2 * np.pi).reshape(-1, 2).T
        quarter = self.stage.channels // 4
        waves = [interleaved_waves(place, quarter, self.base) for place in (y, x)]
        waves = np.concatenate(waves, axis=1).reshape(1, *grid, -1)
        maps = depthwise(jnp.asarray(waves, self.stage.dtype), self.kernel[...], self.bias[...])
        rows = maps.reshape(-1, self.stage.channels)
        return jnp.pad(rows, [(self.stage.embed_prefix, 0), (0, 0)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AddConvolved:
    """A `Terms.transform` that adds a depthwise convolution of the values to attention's output.

    Prefix tokens are excluded.
    """

    kernel: Array | PerLayer
    bias: Array | PerLayer
    grid: Grid = dataclasses.field(metadata={"static": True})

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable) -> Array:
        out = attend(q, k, v)
        batch, heads, head_dim = v.shape[0], *v.shape[-2:]
        tokens = v.reshape(batch, -1, heads, head_dim)
        prefix = tokens.shape[1] - self.grid[0] * self.grid[1]
        maps = tokens[:, prefix:].reshape(batch, *self.grid, heads, head_dim)
        local = depthwise(maps, self.kernel, self.bias).reshape(batch, -1, heads, head_dim)
        local = jnp.pad(local, [(0, 0), (prefix, 0), (0, 0), (0, 0)])
        return out + local.reshape(out.shape)


@scheme("lpe")
class LocalEmbedding(Position):
    """ResFormer's local embedding: a depthwise convolution of the values (arXiv 2212.00776).

    It is added to attention's output: one kernel per layer, the same for all heads, initially zero;
    prefix tokens get nothing. Windows and neighbourhoods convolve the whole map. The paper's model
    is `gpe+lpe`.
    """

    paper = "Tian et al., arXiv 2212.00776"
    equation = "softmax(q k') v + DWConv(v)"
    acts = "transform"
    per_layer = learnable = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs):
        super().__init__(stage, rngs=rngs)
        kernel = jnp.zeros((stage.depth, 3, 3, stage.head_dim), stage.dtype)
        self.kernel = nnx.Param(kernel, decay=False)
        self.bias = nnx.Param(jnp.zeros((stage.depth, stage.head_dim), stage.dtype), decay=False)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        kernel, bias = PerLayer(self.kernel[...]), PerLayer(self.bias[...])
        return Terms(transform=AddConvolved(kernel, bias, grid))


@scheme("peg")
class PositionEncodingGenerator(Position):
    """Conditional position encoding: a depthwise convolution of the tokens (CPVT).

    It is added to the tokens after one block; prefix tokens do not change. In a hierarchical
    backbone each stage has its own (Twins). arXiv 2102.10882.

    Options:
        after: number of the block, 0 (the first one).
    """

    paper = "Chu et al., arXiv 2102.10882"
    equation = "tokens + DWConv(tokens) after the first block"
    acts = "between"
    relative = keeps_norms = False
    learnable = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, after: int = 0):
        super().__init__(stage, rngs=rngs)
        convert(after, Annotated[int, Range(low=0, below=stage.depth)], "after, a block,")
        self.after = after
        draw = normal_init(np.sqrt(2 / 9))  # fan-out of a depthwise kernel, as in Twins
        kernel = draw(rngs.params(), (3, 3, stage.channels), stage.dtype)
        self.kernel = nnx.Param(kernel, decay=False, layers=False)
        self.bias = nnx.Param(jnp.zeros(stage.channels, stage.dtype), decay=False, layers=False)

    def mix_after(self, depth: int) -> tuple[int, ...]:
        return (self.after,)

    def mix(self, tokens: Tokens, grid: Grid, layer: int) -> Tokens:
        if layer != self.after:
            return tokens
        batch, length, channels = tokens.shape
        prefix = length - grid[0] * grid[1]
        maps = tokens[:, prefix:].reshape(batch, *grid, channels)
        convolved = depthwise(maps, self.kernel[...], self.bias[...])
        return tokens.at[:, prefix:].add(convolved.reshape(batch, -1, channels))
