"""Mask2Former's pixel decoder: features of pixels, and maps that queries attend to."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.initializers import fan_in_bias_init, normal_init, xavier_init
from rope_jax.models.heads.encoder import EncoderLayer, Levels, flatten, sines
from rope_jax.models.heads.maps import resize_maps
from rope_jax.models.layers import Linear, conv
from rope_jax.positions.grids import Grid

_POINTS = 4  # that a head reads of each map


def _spread(fan_in: int) -> Callable:
    """detectron2's c2_xavier_fill: uniform, with the variance 1 / fan_in."""
    return fan_in_bias_init(fan_in / 3)


def group_norm(width: int, groups: int, *, rngs: nnx.Rngs, dtypes: dict) -> nnx.GroupNorm:
    """Normalisation of groups of channels over a whole map, as torch's."""
    return nnx.GroupNorm(
        width, num_groups=groups, epsilon=1e-5, use_fast_variance=False, rngs=rngs, **dtypes
    )


def sine_positions(size: Grid, width: int) -> Float[Array, "L C"]:
    """Fixed positions of a map's tokens: sines of rows, then of columns, from 1/n to 1.

    In float32, as in Mask2Former's code.

    Args:
        size: (h, w); L = h x w tokens in reading order.
        width: C, divisible by 4.
    """
    places = (np.indices(size).reshape(2, -1).T + 1) / (np.array(size) + 1e-6)
    return sines(jnp.asarray(places, jnp.float32), width // 2)


class PixelDecoder(nnx.Module):
    """Deformable layers over the maps of strides 32, 16 and 8, and the map of stride 4 on top.

    Source: Cheng et al., arXiv 2112.01527, section 4.1, and facebookresearch/Mask2Former.

    Attributes:
        projections, norms: of the maps of strides 32, 16 and 8 to the same channels.
        levels: added to the positions of each of these maps.
        layers: over the tokens of all three.
        lateral, smooth: a 1 x 1 and a 3 x 3 convolution for the map of stride 4.
        pixels: the last layer of the features of pixels.
    """

    def __init__(
        self,
        channels: Sequence[int],
        *,
        width: int,
        hidden: int,
        depth: int,
        heads: int,
        groups: int,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        settings, coarse = {"rngs": rngs, "dtypes": dtypes}, channels[:0:-1]
        self.projections = nnx.List(
            Linear(inputs, width, kernel_init=xavier_init, rngs=rngs, **dtypes) for inputs in coarse
        )
        self.norms = nnx.List(group_norm(width, groups, **settings) for _ in coarse)
        shape = (len(coarse), width)
        self.levels = nnx.Param(normal_init(1.0)(rngs.params(), shape, dtypes["param_dtype"]))
        layer = {"levels": len(coarse), "heads": heads, "points": _POINTS, "hidden": hidden}
        self.layers = nnx.List(EncoderLayer(width, **layer, **settings) for _ in range(depth))
        self.lateral = Linear(
            channels[0],
            width,
            use_bias=False,
            kernel_init=_spread(channels[0]),
            rngs=rngs,
            **dtypes,
        )
        self.lateral_norm = group_norm(width, groups, **settings)
        self.smooth = conv(
            width, width, 3, stride=1, padding=1, kernel_init=_spread(9 * width), **settings
        )
        self.smooth_norm = group_norm(width, groups, **settings)
        self.pixels = Linear(width, width, kernel_init=_spread(width), rngs=rngs, **dtypes)

    def __call__(
        self, maps: Sequence[Float[Array, "B _H _W _C"]]
    ) -> tuple[Float[Array, "B h w C"], list[Float[Array, "B _h _w C"]]]:
        """Features of pixels at stride 4, and the maps of strides 32, 16 and 8.

        Args:
            maps: of strides 4, 8, 16 and 32.
        """
        layers = zip(self.projections, self.norms, maps[:0:-1], strict=True)
        coarse = [norm(project(x)) for project, norm, x in layers]
        levels = Levels.of([jnp.zeros(x.shape[:3], bool) for x in coarse])  # nothing is padding
        tokens, width = flatten(coarse), coarse[0].shape[-1]
        positions = jnp.concatenate([sine_positions(size, width) for size in levels.sizes])
        positions = positions.astype(tokens.dtype)
        positions += self.levels[...].astype(tokens.dtype)[levels.numbers]
        positions = jnp.broadcast_to(positions, tokens.shape)
        for layer in self.layers:
            tokens = layer(tokens, positions, levels)
        ends = np.cumsum([height * width for height, width in levels.sizes])
        parts = jnp.split(tokens, ends[:-1], axis=1)
        coarse = [part.reshape(x.shape) for part, x in zip(parts, coarse, strict=True)]
        fine = self.lateral_norm(self.lateral(maps[0]))
        fine += resize_maps(coarse[-1], fine.shape[1:3])
        fine = jax.nn.relu(self.smooth_norm(self.smooth(fine)))
        return self.pixels(fine), coarse
