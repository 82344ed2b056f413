"""Mask2Former's pixel decoder: features of pixels, and maps that queries attend to."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.deformable import DeformableAttention
from rope_jax.models.heads.maps import centres, flatten, group_norm, resize_maps, unflatten
from rope_jax.models.heads.mask2former.options import Mask2FormerOptions
from rope_jax.models.heads.queries import EncoderLayer, sine_positions
from rope_jax.models.layers import Linear, conv
from rope_jax.positions.initializers import glorot_init, normal_init, uniform_init

_POINTS = 4  # read by a head in each map


def _spread(fan_in: int) -> Callable:
    """detectron2's c2_xavier_fill: uniform, with the variance 1 / fan_in."""
    return uniform_init((3 / fan_in) ** 0.5)


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
        options: Mask2FormerOptions,
        channels: Sequence[int],
        *,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        settings, coarse = {"rngs": rngs, "dtypes": dtypes}, channels[:0:-1]
        width, groups = options.width, options.groups
        self.projections = nnx.List(
            Linear(inputs, width, kernel_init=glorot_init, rngs=rngs, **dtypes) for inputs in coarse
        )
        self.norms = nnx.List(group_norm(width, groups, **settings) for _ in coarse)
        shape = (len(coarse), width)
        self.levels = nnx.Param(normal_init(1.0)(rngs.params(), shape, dtypes["param_dtype"]))
        points = {"levels": len(coarse), "heads": options.heads, "points": _POINTS}
        attend = functools.partial(DeformableAttention, width, **points, **settings)
        self.layers = nnx.List(
            EncoderLayer(attend(), width, options.pixel_hidden, **settings)
            for _ in range(options.pixel_depth)
        )
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
        coarse = maps[:0:-1]
        sizes = [x.shape[1:3] for x in coarse]
        layers = zip(self.projections, self.norms, coarse, strict=True)
        projected = [norm(project(x)) for project, norm, x in layers]
        dtype, width = projected[0].dtype, projected[0].shape[-1]
        x = flatten(projected)
        positions = [
            sine_positions(size, width).reshape(-1, width).astype(dtype) + level.astype(dtype)
            for size, level in zip(sizes, self.levels[...], strict=True)
        ]
        references = np.repeat(centres(sizes)[None, :, None], len(sizes), axis=2)
        wide = jnp.promote_types(dtype, jnp.float32)
        for layer in self.layers:
            x = layer(x, jnp.concatenate(positions)[None], jnp.asarray(references, wide), sizes)
        coarse = unflatten(x, sizes)
        fine = self.lateral_norm(self.lateral(maps[0]))
        fine += resize_maps(coarse[-1], fine.shape[1:3])
        fine = jax.nn.relu(self.smooth_norm(self.smooth(fine)))
        return self.pixels(fine), coarse
