"""The simple feature pyramid of ViTDet: maps of several strides from a plain ViT's last one.

Source: Li et al., arXiv 2203.16527, section 3, and facebookresearch/detectron2.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.backbone import Backbone, allow_any_mesh
from rope_jax.models.layers import Deconv, conv, layer_dtypes, layer_norm

_EPSILON = 1e-6  # of the layer norms, over channels
_SCALES = (4.0, 2.0, 1.0, 0.5)


class PyramidLevel(nnx.Module):
    """A map at another scale: transposed convolutions or max pooling, then 1 x 1 and 3 x 3.

    Both convolutions have no bias and are followed by a layer norm. Of the transposed convolutions,
    each halves the channels; between two of them are a layer norm and GELU.
    """

    def __init__(self, inputs: int, outputs: int, scale: float, *, rngs: nnx.Rngs, dtypes: dict):
        norm = functools.partial(layer_norm, epsilon=_EPSILON, rngs=rngs, dtypes=dtypes)
        self.scale = scale
        self.deconvs, self.norms, width = nnx.List([]), nnx.List([]), inputs
        for _ in range(int(math.log2(max(scale, 1)))):
            if self.deconvs:
                self.norms.append(norm(width))
            self.deconvs.append(Deconv(width, width // 2, rngs=rngs, dtypes=dtypes))
            width //= 2
        settings = {"stride": 1, "rngs": rngs, "dtypes": dtypes}
        self.lateral, self.lateral_norm = (
            conv(width, outputs, 1, padding=0, **settings),
            norm(outputs),
        )
        self.output, self.output_norm = (
            conv(outputs, outputs, 3, padding=1, **settings),
            norm(outputs),
        )

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B h w C2"]:
        for index, deconv in enumerate(self.deconvs):
            if index:
                x = jax.nn.gelu(self.norms[index - 1](x), approximate=False)
            x = deconv(x)
        if self.scale < 1:
            x = nnx.max_pool(x, (2, 2), (2, 2))
        return self.output_norm(self.output(self.lateral_norm(self.lateral(x))))


class FeaturePyramid(nnx.Module):
    """Maps of all scales from one map, and the coarsest one subsampled once more.

    >>> import jax
    >>> from flax import nnx
    >>> from rope_jax.models.pyramid import FeaturePyramid
    >>> pyramid = FeaturePyramid(96, outputs=32, rngs=nnx.Rngs(0))
    >>> [x.shape for x in jax.eval_shape(pyramid, [jax.numpy.zeros((1, 5, 9, 96))])]
    [(1, 20, 36, 32), (1, 10, 18, 32), (1, 5, 9, 32), (1, 2, 4, 32), (1, 1, 2, 32)]

    Args:
        inputs: channels of the map.
        outputs: channels of the maps of the pyramid.
        scales: of the maps, relative to the input map, largest first: powers of 2 from 1/2; DINO
            has (2, 1, .5).
        dtype: of activations, as in `create_model`.
        rngs: for the initial weights.

    Attributes:
        least: side in tokens of the smallest maps, which are halved.

    Raises:
        ValueError: scales for which no maps can be made.
    """

    least: ClassVar[int] = 2

    def __init__(
        self,
        inputs: int,
        *,
        outputs: int = 256,
        scales: Sequence[float] = _SCALES,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        allowed = {0.5, *(2.0**n for n in range(int(math.log2(inputs))) if inputs % 2**n == 0)}
        if not scales or not {*scales} <= allowed or sorted({*scales}, reverse=True) != [*scales]:
            raise ValueError(
                f"scales={tuple(scales)} must be powers of 2 in descending order, from 0.5 to one "
                f"that divides the map's {inputs} channels"
            )
        dtypes = layer_dtypes(jnp.dtype(dtype))
        self.levels = nnx.List(
            PyramidLevel(inputs, outputs, scale, rngs=rngs, dtypes=dtypes) for scale in scales
        )

    def __call__(
        self, maps: Sequence[Float[Array, "B H W C"]], train: bool = False
    ) -> list[Float[Array, "B _h _w C2"]]:
        """The maps of the pyramid, finest first.

        Args:
            maps: of a backbone, of which the last is used.
            train: is not used; other necks have batch statistics.
        """
        outputs = [level(maps[-1]) for level in self.levels]
        return [*outputs, outputs[-1][:, ::2, ::2]]


class PyramidBackbone(nnx.Module):
    """An isotropic backbone and the feature pyramid of its last map, which is not normalised.

    >>> import jax
    >>> import rope_jax
    >>> from flax import nnx
    >>> from rope_jax.models.pyramid import FeaturePyramid, PyramidBackbone
    >>> vit = rope_jax.create_model(
    ...     "deit_ti16", depth=2, class_token=False, attention="window", window_size=4,
    ...     global_blocks=(1,), window_padding="tokens", last_norm=False, num_classes=0,
    ... )
    >>> model = PyramidBackbone(vit, FeaturePyramid(192, outputs=32, rngs=nnx.Rngs(1)))
    >>> [x.shape[1:3] for x in jax.eval_shape(model.features, jax.numpy.zeros((1, 96, 160, 3)))]
    [(24, 40), (12, 20), (6, 10), (3, 5), (2, 3)]

    In a model with a head, `create_model` does the same. `save_pretrained` writes such a combined
    model, and `load_pretrained` reads it into another one.

    Attributes:
        backbone: a model of one part, with num_classes=0 and last_norm=False.
        neck: its pyramid.
        options: of the backbone.
        name: None, because `create_model` does not create it.
    """

    num_classes = 0
    name = None

    def __init__(self, backbone: Backbone, neck: FeaturePyramid):
        self.backbone, self.neck = backbone, neck
        self.options = backbone.options

    def parts(self) -> dict[str, nnx.Module]:
        """The backbone's parts, see `Backbone.parts`."""
        return {f"backbone.{prefix}": part for prefix, part in self.backbone.parts().items()}

    @allow_any_mesh
    def features(
        self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None
    ) -> list[Float[Array, "B _h _w C"]]:
        """The maps of the pyramid, finest first; arguments as in `Backbone.features`."""
        maps = self.backbone.features(images, norm=False, train=train, key=key)
        return self.neck(maps, train)
