"""Mask2Former (Cheng et al., arXiv 2112.01527) for semantic segmentation."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.heads.head import Maps, SegmentationHead, register_head
from rope_jax.models.heads.maps import resize_maps
from rope_jax.models.heads.mask2former.decoder import MaskedDecoder, mask_logits
from rope_jax.models.heads.mask2former.loss import set_loss
from rope_jax.models.heads.mask2former.options import Mask2FormerOptions
from rope_jax.models.heads.mask2former.pixel_decoder import PixelDecoder
from rope_jax.models.heads.pixels import pixel_accuracy
from rope_jax.positions.grids import Grid


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskPredictions:
    """Predictions of queries, before the decoder's first layer and after each.

    Attributes:
        classes: [layers, B, Q, K + 1], logits; the last class is that of no object.
        embeddings: [layers, B, Q, C], of the masks.
        pixels: [B, h, w, C], whose products with the embeddings are the masks' logits.
    """

    classes: Float[Array, "layers B Q K1"]
    embeddings: Float[Array, "layers B Q C"]
    pixels: Float[Array, "B h w C"]

    def masks(self, layer: int = -1) -> Float[Array, "B h w Q"]:
        """Logits of the masks of a layer."""
        return mask_logits(self.embeddings[layer], self.pixels)


def semantic_scores(
    classes: Float[Array, "B Q K1"], masks: Float[Array, "B h w Q"]
) -> Float[Array, "B h w K"]:
    """Scores of the classes of pixels: sums over queries of a class' and a mask's probability.

    >>> classes, masks = jnp.array([[[0.0, 0.0, -99.0]]]), jnp.zeros((1, 1, 1, 1))
    >>> semantic_scores(classes, masks).ravel().tolist()
    [0.25, 0.25]

    Args:
        classes: logits; the last class is that of no object, and has no score.
        masks: logits, of any size.
    """
    probabilities = jax.nn.softmax(classes.astype(masks.dtype))[..., :-1]
    return jnp.einsum("bqk,bhwq->bhwk", probabilities, jax.nn.sigmoid(masks))


class Mask2Former(SegmentationHead):
    """Queries predict masks and their classes; a pixel has the class of the highest score.

    Attributes:
        pixel_decoder: from maps to the features of pixels.
        decoder: from these to the predictions of queries.
    """

    strides: ClassVar[tuple[int, ...]] = (4, 8, 16, 32)
    normalised: ClassVar[bool] = False
    divisible: ClassVar[bool] = False

    def __init__(
        self,
        options: Mask2FormerOptions,
        *,
        channels: tuple[int, ...],
        num_classes: int,
        rngs: nnx.Rngs,
        dtypes: dict,
    ):
        self.options, self.out_features = options, num_classes
        self.pixel_decoder = PixelDecoder(options, channels, rngs=rngs, dtypes=dtypes)
        self.decoder = MaskedDecoder(options, num_classes, rngs=rngs, dtypes=dtypes)

    def __call__(
        self, maps: Maps, *, train: bool = False, key: Array | None = None
    ) -> MaskPredictions:
        pixels, coarse = self.pixel_decoder(maps)
        return MaskPredictions(*self.decoder(pixels, coarse), pixels)

    def result(self, predictions: MaskPredictions, image_size: Grid) -> Float[Array, "B H W K"]:
        """Scores of all pixels, which are not logits; those of a pixel need not sum to 1."""
        masks = resize_maps(predictions.masks(), image_size)
        return semantic_scores(predictions.classes[-1], masks)

    def probabilities(self, results: Float[Array, "H W K"]) -> Float[Array, "H W K"]:
        """The scores themselves."""
        return results

    def loss(
        self,
        predictions: MaskPredictions,
        batch: Mapping[str, Array],
        *,
        key: Array,
        divisor: str = "all",
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The loss of all layers (`set_loss`), and the pixel accuracy of the last.

        Args:
            predictions: of this head in training.
            batch: with `label` uint8 [B, H, W], the classes of pixels, or 255.
            key: for the points at which masks are compared.
            divisor: not used: the sum over masks is divided by their number.
        """
        labels, classes = batch["label"], predictions.classes
        value = set_loss(
            classes,
            predictions.embeddings,
            predictions.pixels,
            labels,
            points=self.options.loss_points,
            key=key,
        )
        scores = semantic_scores(*jax.lax.stop_gradient((classes[-1], predictions.masks())))
        return value, pixel_accuracy(scores, labels)


register_head("mask2former", Mask2Former, Mask2FormerOptions())
