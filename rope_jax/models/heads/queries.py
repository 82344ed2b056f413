"""Parts of transformers of queries, as in DETR (Carion et al., arXiv 2005.12872).

Layers are post-norm: a norm follows every sum of tokens and a branch.
"""

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from rope_jax.models.deformable import DeformableAttention
from rope_jax.models.layers import Linear, Mlp, layer_norm
from rope_jax.positions.grids import Grid
from rope_jax.positions.initializers import fan_in_bias_init, glorot_init, uniform_init

EPSILON = 1e-5
"""Of the norms: torch's default."""


def sines(
    coordinates: Float[Array | np.ndarray, "*N D"], features: int
) -> Float[Array | np.ndarray, "*N F"]:
    """Sines and cosines, in turn, of each coordinate times 2 pi over 10000^(2 i / features).

    >>> [round(x, 4) for x in sines(np.array([0.125]), 4).tolist()]
    [0.7071, 0.7071, 0.0079, 1.0]

    Args:
        coordinates: D of each point. Those of NumPy give a constant.
        features: of each coordinate, an even number.

    Returns:
        F = D x features channels.
    """
    xp = coordinates.__array_namespace__()
    scales = (10000 ** (np.arange(0, features, 2) / features)).astype(np.float32)
    angles = (coordinates * (2 * math.pi))[..., None] / xp.asarray(scales, coordinates.dtype)
    pairs = xp.stack([xp.sin(angles), xp.cos(angles)], axis=-1)
    return pairs.reshape(*coordinates.shape[:-1], -1)


@functools.cache
def sine_positions(size: Grid, width: int) -> Float[np.ndarray, "h w C"]:
    """Fixed positions of a map's tokens: sines and cosines of rows, then of columns.

    Rows run from 2 pi / h to 2 pi, columns likewise; pair k of K has a period of 10,000^(k/K) times
    2 pi, rounded to float32. In float64.

    >>> sine_positions((1, 4), 4)[0, :, 2].round(3).tolist()
    [1.0, 0.0, -1.0, -0.0]

    Source: Mask2Former's code, which normalises DETR's.

    Args:
        size: (h, w).
        width: C, divisible by 4.
    """
    rows, columns = (np.arange(1, count + 1) / (count + 1e-6) for count in size)
    return sines(np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1), width // 2)


class Attention(nnx.Module):
    """Multi-head attention of queries to other tokens, as torch's `MultiheadAttention`."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs, dtypes: dict):
        self.heads = heads
        # torch draws the first three as one matrix.
        init = uniform_init((6 / (4 * width)) ** 0.5)
        self.q, self.k, self.v = (
            Linear(width, width, kernel_init=init, rngs=rngs, **dtypes) for _ in range(3)
        )
        self.out = Linear(width, width, kernel_init=glorot_init, rngs=rngs, **dtypes)

    def __call__(
        self,
        queries: Float[Array, "B Q C"],
        keys: Float[Array, "B L C"],
        values: Float[Array, "B L C"],
        mask: Bool[Array, "#B Q L"] | None = None,
    ) -> Float[Array, "B Q C"]:
        """Returns the output of every query.

        Args:
            queries, keys: with their positions.
            values: of the keys' tokens.
            mask: True for keys that a query attends to; every row has at least one.
        """
        pairs = ((self.q, queries), (self.k, keys), (self.v, values))
        q, k, v = (layer(x).reshape(*x.shape[:2], self.heads, -1) for layer, x in pairs)
        mask = None if mask is None else mask[:, None]
        output = jax.nn.dot_product_attention(q, k, v, mask=mask)
        return self.out(output.reshape(queries.shape))


def glorot_linear(inputs: int, outputs: int, *, rngs: nnx.Rngs, dtypes: dict) -> Linear:
    """A linear layer of torch with the kernel of DETR's transformers."""
    init = {"kernel_init": glorot_init, "bias_init": fan_in_bias_init(inputs)}
    return Linear(inputs, outputs, rngs=rngs, **init, **dtypes)


class FeedForward(Mlp):
    """Two layers with ReLU between them, added to their input, and a norm."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs, dtypes: dict):
        settings = {"rngs": rngs, "dtypes": dtypes}
        super().__init__(width, hidden, activation=jax.nn.relu, make=glorot_linear, **settings)
        self.norm = layer_norm(width, EPSILON, **settings)

    def __call__(self, x: Float[Array, "B L C"]) -> Float[Array, "B L C"]:
        return self.norm(x + super().__call__(x))


class EncoderLayer(nnx.Module):
    """Deformable attention of all tokens to all maps, and a feed-forward layer; norms after both.

    Args:
        attn: of `width` channels.
        width: channels.
        hidden: channels of the feed-forward layer.
    """

    def __init__(
        self,
        attn: DeformableAttention,
        width: int,
        hidden: int,
        *,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        self.attn = attn
        self.norm = layer_norm(width, EPSILON, rngs=rngs, dtypes=dtypes)
        self.mlp = FeedForward(width, hidden, rngs=rngs, dtypes=dtypes)

    def __call__(
        self,
        x: Float[Array, "B S C"],
        positions: Float[Array, "#B S C"],
        references: Float[Array, "#B S levels 2"],
        sizes: Sequence[Grid],
        padding: Bool[Array, "B S"] | None = None,
    ) -> Float[Array, "B S C"]:
        """Returns the tokens after this layer.

        Args:
            x: tokens.
            positions: of the tokens.
            references: the place of every token on all maps, see `DeformableAttention`.
            sizes: (rows, columns) of each map.
            padding: True for tokens that count as 0.
        """
        return self.mlp(self.norm(x + self.attn(x + positions, references, x, sizes, padding)))


def perceptron(layers: nnx.List, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
    """Layers with ReLU between them."""
    for layer in layers[:-1]:
        x = jax.nn.relu(layer(x))
    return layers[-1](x)
