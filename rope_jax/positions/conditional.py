"""Schemes whose position information comes out of depthwise convolutions of 3 x 3 tokens and the zeros around a map."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.initializers import normal_init
from rope_jax.positions import grids
from rope_jax.positions.absolute import Absolute, check_channels, interleaved
from rope_jax.positions.scheme import Grid, PerLayer, Position, Stage, Terms, check_finite, scheme


def depthwise(maps: Float[Array, "B H W *C"], kernel: Float[Array, "3 3 D"], bias: Float[Array, " D"]) -> Float[Array, "B H W *C"]:
    """Convolves each channel with its own 3 x 3 kernel, zeros around the map; computed in the kernel's precision, returned in the map's.

    The last axis of `maps` has D channels; axes between it and the map share the kernel. It is a sum of nine shifted maps, which XLA
    makes one pass over memory: its grouped convolutions are slow, and their gradients slower.
    """
    height, width = maps.shape[1:3]
    padded = jnp.pad(maps, [(0, 0), (1, 1), (1, 1)] + [(0, 0)] * (maps.ndim - 3)).astype(kernel.dtype)
    shifted = (padded[:, y : y + height, x : x + width] * kernel[y, x] for y in range(3) for x in range(3))
    return (sum(shifted) + bias).astype(maps.dtype)


@scheme("gpe")
class GlobalEmbedding(Absolute):
    """ResFormer's global embedding: sines and cosines of row and column on maps of (0, 2 pi], smoothed by a learned depthwise convolution.

    The first half of the channels has the row, (i + 1) / H * 2 pi, the second one the column, sine and cosine in turn; prefix tokens get
    zeros (arXiv 2212.00776). base: of the frequencies base**(-2 i / (C/2)), 10000.
    """

    paper = "Tian et al., arXiv 2212.00776"
    equation = "tokens + DWConv(sin, cos of 2 pi y f and 2 pi x f), (x, y) in (0, 1]"
    resolution = "interpolate"
    learnable = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, base: float = 10000.0):
        super().__init__(stage, rngs=rngs)
        check_channels(stage, 4)
        self.base = check_finite("base", base)
        draw = lambda *shape: jax.random.uniform(rngs.params(), shape, stage.dtype, -1 / 3, 1 / 3)  # torch's start of a convolution
        self.kernel = nnx.Param(draw(3, 3, stage.channels), decay=False, layers=False)
        self.bias = nnx.Param(draw(stage.channels), decay=False, layers=False)

    def table(self, grid: Grid) -> Float[Array, "T C"]:
        """See `Absolute.table`."""
        y, x = ((grids.absolute(grid) + 1) / grid * 2 * np.pi).reshape(-1, 2).T
        count = self.stage.channels // 4
        waves = np.concatenate([interleaved(place, count, self.base) for place in (y, x)], axis=1)
        maps = jnp.asarray(waves.reshape(1, *grid, -1), self.stage.dtype)
        rows = depthwise(maps, self.kernel[...], self.bias[...]).reshape(-1, self.stage.channels)
        return jnp.pad(rows, [(self.stage.embed_prefix, 0), (0, 0)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AddConvolved:
    """A transform that adds to the output of attention what a depthwise convolution makes of the values, prefix tokens left out."""

    kernel: Array | PerLayer
    bias: Array | PerLayer
    grid: Grid = dataclasses.field(metadata={"static": True})

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable) -> Array:
        """See `Terms.transform`."""
        out = attend(q, k, v)
        batch, heads, head_dim = v.shape[0], *v.shape[-2:]
        tokens = v.reshape(batch, -1, heads, head_dim)
        prefix = tokens.shape[1] - self.grid[0] * self.grid[1]
        local = depthwise(tokens[:, prefix:].reshape(batch, *self.grid, heads, head_dim), self.kernel, self.bias)
        local = jnp.pad(local.reshape(batch, -1, heads, head_dim), [(0, 0), (prefix, 0), (0, 0), (0, 0)])
        return out + local.reshape(out.shape)


@scheme("lpe")
class LocalEmbedding(Position):
    """ResFormer's local embedding: attention's output gets a depthwise convolution of the values (arXiv 2212.00776).

    One kernel per layer, the same for all heads, zero at the start; prefix tokens get nothing. Windows and neighbourhoods convolve the
    whole map. The paper's model is `gpe+lpe`.
    """

    paper = "Tian et al., arXiv 2212.00776"
    equation = "softmax(q k') v + DWConv(v)"
    acts = "transform"
    per_layer = learnable = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs):
        super().__init__(stage, rngs=rngs)
        self.kernel = nnx.Param(jnp.zeros((stage.depth, 3, 3, stage.head_dim), stage.dtype), decay=False)
        self.bias = nnx.Param(jnp.zeros((stage.depth, stage.head_dim), stage.dtype), decay=False)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        return Terms(transform=AddConvolved(PerLayer(self.kernel[...]), PerLayer(self.bias[...]), grid))


@scheme("peg")
class PositionEncodingGenerator(Position):
    """Conditional position encoding: behind one block, tokens get a depthwise convolution of themselves (CPVT, arXiv 2102.10882).

    Prefix tokens stay as they are. In backbones of stages each has its own (Twins). after: number of the block, 0 (the first one).
    """

    paper = "Chu et al., arXiv 2102.10882"
    equation = "tokens + DWConv(tokens) behind the first block"
    acts = "between"
    relative = keeps_norms = False
    learnable = True

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, after: int = 0):
        super().__init__(stage, rngs=rngs)
        if not 0 <= after < stage.depth:
            raise ValueError(f"after={after} is not allowed; use the number of a block, 0 to {stage.depth - 1}")
        self.after = after
        spread = np.sqrt(2 / 9)  # fan-out of a depthwise kernel, as in Twins
        self.kernel = nnx.Param(normal_init(spread)(rngs.params(), (3, 3, stage.channels), stage.dtype), decay=False, layers=False)
        self.bias = nnx.Param(jnp.zeros(stage.channels, stage.dtype), decay=False, layers=False)

    def mix_after(self, depth: int) -> tuple[int, ...]:
        """See `Position.mix_after`."""
        return (self.after,)

    def mix(self, tokens: Array, grid: Grid, layer: int) -> Array:
        """See `Position.mix`."""
        if layer != self.after:
            return tokens
        prefix = tokens.shape[1] - grid[0] * grid[1]
        maps = tokens[:, prefix:].reshape(tokens.shape[0], *grid, -1)
        convolved = depthwise(maps, self.kernel[...], self.bias[...]).reshape(tokens.shape[0], -1, tokens.shape[2])
        return tokens.at[:, prefix:].add(convolved)
