"""The interface of heads, and heads by name.

A head takes feature maps and returns predictions. It is given channels and strides of the maps,
and does not depend on the backbone that they come from.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.heads.maps import resize_maps
from rope_jax.models.heads.pixels import pixel_accuracy, pixel_loss
from rope_jax.models.registry import Options
from rope_jax.names.registry import Registry
from rope_jax.positions.grids import Grid

Maps = Sequence[Float[Array, "B _h _w _C"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PixelLogits:
    """Predictions of a segmentation head.

    >>> import jax.numpy as jnp
    >>> PixelLogits(jnp.zeros((2, 8, 8, 11))).auxiliary is None
    True

    Attributes:
        logits: [B, h, w, K], to be resized to the image.
        auxiliary: those of a second head, for the loss alone; or None.
        auxiliary_weight: of their loss.
    """

    logits: Float[Array, "B h w K"]
    auxiliary: Float[Array, "B h2 w2 K"] | None = None
    auxiliary_weight: float = dataclasses.field(default=0.0, metadata={"static": True})


class Head(nnx.Module):
    """Base of all heads.

    >>> import rope_jax.models.heads
    >>> HEADS["upernet"].family.strides
    (4, 8, 16, 32)

    The constructor takes the options, the maps' `channels` (a number for each, strides ascending),
    `num_classes`, `dtypes` and `rngs`.

    Attributes:
        task: the task of the predictions, a key of `rope_jax.tasks.TASKS`.
        padded: whether it takes the extents of images that are padded, `extent` and `image_size`.
        strides: of the maps that it takes, in pixels, of which backbones with four stages have only
            those up to 32; None for one map of any stride, the last.
        scales: of the `FeaturePyramid` that makes these maps from the last one of a plain ViT, with
            as many channels as the head's option `width`; None for maps of several blocks.
        normalised: whether maps of single blocks are normalised by the model's last norm; maps of
            every stage have norms of their own.
        divisible: False where a part of a batch cannot be computed by itself, as its loss needs a
            count of the whole batch: `accumulate` is refused.
        options: of this head.
        out_features: number of classes.
    """

    task: ClassVar[str]
    padded: ClassVar[bool] = False
    strides: ClassVar[tuple[int, ...] | None] = None
    scales: ClassVar[tuple[float, ...] | None] = None
    normalised: ClassVar[bool] = True
    divisible: ClassVar[bool] = True
    options: Options
    out_features: int

    @abc.abstractmethod
    def __call__(
        self, maps: Maps, *, train: bool = False, key: Array | None = None, **extra: Any
    ) -> Any:
        """Predictions, in the form that the task's loss takes.

        Args:
            maps: as many as the constructor was given channels.
            train: whether to use dropout and batch statistics.
            key: for dropout; None drops nothing.
            extra: other arguments that the task passes, such as `extent` for detection.

        Raises:
            ValueError: the maps are too small for this head.
        """

    @property
    def num_classes(self) -> int:
        """Number of classes, as of models."""
        return self.out_features

    def parts(self) -> dict[str, nnx.Module]:
        """Returns no parts: heads have no schemes. (Weights are converted for models and heads.)"""
        return {}

    @abc.abstractmethod
    def result(self, predictions: Any, image_size: Grid) -> Any:
        """The model's output for images of (height, width) pixels."""

    @abc.abstractmethod
    def loss(
        self,
        predictions: Any,
        batch: Mapping[str, Array],
        *,
        key: Array | None = None,
        **settings: Any,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The training loss of predictions, and a metric for the progress line.

        Args:
            predictions: of this head in training.
            batch: of the task's `prepare_batch`.
            key: for losses that draw.
            settings: of the run, which the task names.
        """


class SegmentationHead(Head):
    """Base of heads that give every pixel a class: they return `PixelLogits`.

    A head of your own, the logits of the mean token at every pixel:

    >>> import jax.numpy as jnp
    >>> from rope_jax import create_model
    >>> class Mean(SegmentationHead):
    ...     def __init__(self, options, *, channels, num_classes, dtypes, rngs):
    ...         self.options, self.out_features = options, num_classes
    ...         self.classify = nnx.Linear(channels[-1], num_classes, rngs=rngs, **dtypes)
    ...
    ...     def __call__(self, maps, *, train=False, key=None):
    ...         return PixelLogits(self.classify(maps[-1].mean((1, 2), keepdims=True)))
    >>> register_head("mean_token", Mean, Options())
    >>> model = create_model("vit_digits", head="mean_token", num_classes=3, depth=1)
    >>> model(jnp.zeros((1, 8, 12, 3))).shape
    (1, 8, 12, 3)
    """

    task: ClassVar[str] = "segmentation"

    def result(self, predictions: PixelLogits, image_size: Grid) -> Float[Array, "B H W K"]:
        return resize_maps(predictions.logits, image_size)

    def probabilities(self, results: Float[Array, "H W K"]) -> Float[Array, "H W K"]:
        """Probabilities of classes from means of results, over the windows that see a pixel."""
        return jax.nn.softmax(results)

    def loss(
        self,
        predictions: PixelLogits,
        batch: Mapping[str, Array],
        *,
        key: Array | None = None,
        divisor: str = "all",
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The cross entropy with that of auxiliary logits, and the pixel accuracy.

        Args:
            predictions: of this head in training.
            batch: with `label` uint8 [B, H, W], the classes of pixels, or 255.
            key: not used.
            divisor: see `pixel_loss`.
        """
        labels = batch["label"]
        value = pixel_loss(predictions.logits, labels, divisor=divisor)
        if predictions.auxiliary is not None:
            other = pixel_loss(predictions.auxiliary, labels, divisor=divisor)
            value += predictions.auxiliary_weight * other
        return value, pixel_accuracy(predictions.logits, labels)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A registered head: its class and its default options."""

    family: Callable[..., Head]
    options: Options


HEADS: Registry[Entry] = Registry("head")


def register_head(name: str, family: Callable[..., Head], options: Options) -> None:
    """Registers a head.

    >>> from rope_jax.models.heads.linear import LinearHead, LinearOptions
    >>> register_head("mine", LinearHead, LinearOptions())
    >>> "mine" in list_heads()
    True
    >>> del HEADS["mine"]  # in this example only

    Args:
        name: for `create_model(..., head=name)`.
        family: class of the head.
        options: defaults; their fields can be overridden by name.

    Raises:
        ValueError: a head of this name exists, or the name is not an identifier.
    """
    HEADS.register(name, Entry(family, options))


def list_heads(pattern: str = "*") -> list[str]:
    """Names of all heads that match a shell-style pattern, sorted.

    >>> import rope_jax.models.heads
    >>> list_heads("*er*")
    ['mask2former', 'segmenter', 'upernet']
    """
    return HEADS.names(pattern)
