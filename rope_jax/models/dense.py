"""Dense prediction: a backbone, a neck that makes the maps a head takes, and the head."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models import registry
from rope_jax.models.backbone import Backbone
from rope_jax.models.heads import Head, create_head, find_head
from rope_jax.models.layers import dtypes_of
from rope_jax.models.necks import FourScales, StageNorms
from rope_jax.positions.grids import Grid
from rope_jax.text import parse
from rope_jax_kernels import Pattern


class DenseModel(Backbone):
    """A backbone with a head of dense prediction.

    Attributes:
        backbone: without a classifier.
        neck: from the backbone's maps to the head's, or None where they are the same.
        head: from `rope_jax.models.heads`.
        blocks: whose maps are taken; None for the last of every stage.
        head_notation: the text of the head.
    """

    def __init__(
        self,
        backbone: Backbone,
        neck: nnx.Module | None,
        head: Head,
        blocks: tuple[int, ...] | None = None,
    ):
        self.backbone, self.neck, self.head = backbone, neck, head
        self.blocks, self.options, self.task = blocks, backbone.options, head.task

    def features(
        self, images: Float[Array, "B h w 3"], **options: Any
    ) -> list[Float[Array, "B _H _W _C"]]:
        return self.backbone.features(images, **options)

    def head_maps(
        self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None
    ) -> list[Float[Array, "B _H _W _C"]]:
        """The maps that the head takes. Arguments as in `__call__`."""
        maps = self.backbone.features(
            images, blocks=self.blocks, norm=self.head.normalised, train=train, key=key
        )
        return maps if self.neck is None else self.neck(maps, train)

    def predict(
        self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None
    ) -> Any:
        """What the task's loss takes: the head's predictions. Arguments as in `__call__`."""
        keys = self.training_keys(train, key, 2)
        return self.head(self.head_maps(images, train=train, key=keys[0]), train=train, key=keys[1])

    def __call__(
        self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None
    ) -> Any:
        """The head's result for images; for segmentation logits [B, h, w, classes] of all pixels.

        Args:
            images: normalised, of any size that `grids` accepts.
            train: whether to use dropout, augmented positions and batch statistics.
            key: for randomness in training; not needed in evaluation.
        """
        predictions = self.predict(images, train=train, key=key)
        return self.head.result(predictions, images.shape[1:3])

    def training_keys(self, train: bool, key: Array | None, count: int) -> list[Array | None]:
        if train and key is None:
            for name in self.head.options.draws:
                if getattr(self.head.options, name) > 0:
                    raise ValueError(
                        f"train=True needs a key for the head's {name.replace('_', ' ')}: pass "
                        f"key=jax.random.key(...), or create the head with {name}=0"
                    )
        return super().training_keys(train, key, count)

    def parts(self) -> dict[str, nnx.Module]:
        return {f"backbone.{name}": part for name, part in self.backbone.parts().items()}

    def grids(self, image_size: Grid) -> list[Grid]:
        return self.backbone.grids(image_size)

    def patterns(self, part: int, grid: Grid) -> list[Pattern]:
        return self.backbone.patterns(part, grid)

    def resize(self, image_size: int | Grid) -> None:
        self.backbone.resize(image_size)
        self.image_size = self.backbone.image_size

    def prepare(self, image_size: Grid) -> None:
        self.backbone.prepare(image_size)

    def scale_windows(self) -> None:
        self.backbone.scale_windows()

    def window_rule(self, *, scaled: bool = False) -> str | None:
        return self.backbone.window_rule(scaled=scaled)


def third_blocks(depth: int) -> tuple[int, ...]:
    """The blocks of a plain ViT whose outputs become four maps: 3, 5, 7, 11 of 12.

    >>> third_blocks(12), third_blocks(24)
    ((3, 5, 7, 11), (7, 11, 15, 23))

    Source: BEiT's segmentation, and Heo et al.; other depths in the same proportions.
    """
    return tuple(max(place, depth * share // 6 - 1) for place, share in enumerate((2, 3, 4, 6)))


def create_dense(
    name: str,
    *,
    head: str,
    num_classes: int,
    blocks: Sequence[int] | None = None,
    seed: int = 0,
    **settings: Any,
) -> DenseModel:
    """Creates a backbone with a head.

    Args:
        name: of the backbone, for `create_model`.
        head: one of `list_heads()`, with options if any: "upernet(width=512)".
        num_classes: of the predictions.
        blocks: of a plain ViT, 0-based, whose maps a head of four maps takes; None for
            `third_blocks`.
        seed: of the initial weights.
        **settings: of `create_model`.

    Raises:
        ValueError: an unknown head, or one that this backbone cannot serve.
    """
    (call,) = parse(head, "head")
    wanted = find_head(call.name).family
    backbone = registry.create_model(
        name, num_classes=0, seed=seed, last_norm=wanted.normalised, **settings
    )
    rngs, dtypes = nnx.Rngs(seed + 1), dtypes_of(jnp.dtype(settings.get("dtype", "float32")))
    stages = [part.position.stage for part in backbone.parts().values()]
    widths, depth, neck = [stage.channels for stage in stages], sum(s.depth for s in stages), None
    if wanted.strides is None and backbone.own_maps:
        raise ValueError(
            f"the head {call.name!r} takes one map, but {name} makes four of other strides: use "
            "upernet, or another model"
        )
    if backbone.own_maps:
        widths = widths * len(wanted.strides)
    elif wanted.strides is None:
        widths, blocks = widths[-1:], (depth - 1,)
    elif len(stages) == 1:
        neck, widths = FourScales(widths[0], rngs=rngs, dtypes=dtypes), widths * 4
        blocks = third_blocks(depth) if blocks is None else tuple(blocks)
        if len(blocks) != 4 or max(blocks) >= depth:
            raise ValueError(
                f"the head {call.name!r} takes the maps of four blocks, not {blocks} of the "
                f"{depth} of {name}: change blocks, or use a deeper model or another head"
            )
    else:
        epsilon = backbone.options.norm_epsilon
        neck = StageNorms(widths, epsilon, rngs=rngs, dtypes=dtypes)
    made = create_head(
        call.name,
        channels=widths,
        num_classes=num_classes,
        dtype=dtypes["dtype"],
        rngs=rngs,
        overrides=dict(call.options),
    )
    model = DenseModel(backbone, neck, made, blocks)
    model.name, model.notation, model.image_size = name, backbone.notation, backbone.image_size
    return model
