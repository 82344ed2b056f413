"""Dense prediction: a backbone, a neck that makes the maps a head takes, and the head."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.models.backbone import Backbone
from rope_jax.models.heads import HEADS, Head, create_head, find_head
from rope_jax.models.layers import dtypes_of
from rope_jax.models.necks import FourScales, StageNorms
from rope_jax.models.pretrained.metadata import Description
from rope_jax.models.registry import check_classes, create_backbone, find_model
from rope_jax.positions.grids import Grid
from rope_jax.text import Call, parse
from rope_jax_kernels import Pattern


class DenseModel(Backbone):
    """A backbone with a head of dense prediction.

    Attributes:
        backbone: without a classifier.
        neck: from the backbone's maps to the head's, or None where they are the same.
        head: from `rope_jax.models.heads`.
        blocks: whose maps are taken; None for the last of every stage.
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
        self.grids(images.shape[1:3])
        # Maps of every stage have norms of their own, of the neck or the backbone.
        norm = self.head.normalised if self.blocks is not None else False
        maps = self.backbone.features(images, blocks=self.blocks, norm=norm, train=train, key=key)
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
        grids = self.backbone.grids(image_size)
        if min(grids[-1]) < getattr(self.neck, "least", 1):
            height, width = image_size
            raise ValueError(
                f"images of {height}x{width} pixels give this head maps of less than "
                f"{self.neck.least} tokens a side: use larger images, or another head"
            )
        return grids

    def patterns(self, part: int, grid: Grid) -> list[Pattern]:
        return self.backbone.patterns(part, grid)

    def resize(self, image_size: int | Grid) -> None:
        self.backbone.resize(image_size)
        self.image_size = self.backbone.image_size

    def places(self, image_size: Grid) -> dict[str, int]:
        raise ValueError(
            "multiply-adds of necks and heads are not counted: pass the model's backbone alone, "
            "model.backbone"
        )

    def prepare(self, image_size: Grid) -> None:
        self.backbone.prepare(image_size)

    def scale_windows(self) -> None:
        self.backbone.scale_windows()

    def window_rule(self, *, scaled: bool = False) -> str | None:
        return self.backbone.window_rule(scaled=scaled)


def head_call(head: str) -> Call:
    """The name and options of a head's text.

    >>> head_call("upernet(width=512)").name
    'upernet'

    Raises:
        ValueError: it is not the text of one head.
    """
    calls = parse(head, "head") if isinstance(head, str) else []
    if len(calls) != 1:
        raise ValueError(f"head={head!r} must be the text of one head, such as 'upernet'")
    return calls[0]


def third_blocks(depth: int) -> tuple[int, ...]:
    """The blocks of a plain ViT whose outputs become four maps: 3, 5, 7, 11 of 12.

    >>> third_blocks(12), third_blocks(24)
    ((3, 5, 7, 11), (7, 11, 15, 23))

    Source: BEiT's segmentation, and Heo et al.; other depths in the same proportions.
    """
    return tuple(max(place, depth * share // 6 - 1) for place, share in enumerate((2, 3, 4, 6)))


def create_dense(
    name: str,
    described: Description | None = None,
    *,
    head: str,
    blocks: Sequence[int] | None = None,
    num_classes: Any = None,
    seed: int = 0,
    dtype: Any = jnp.float32,
    overrides: Mapping[str, Any] = {},
    **settings: Any,
) -> DenseModel:
    """A backbone with a head, with initial weights. Arguments as in `create_model`.

    What is None is what `described` has, a model with weights.
    """
    call = head_call(head)
    wanted = find_head(call.name).family
    if num_classes is None and described is not None and described.head is not None:
        num_classes = described.num_classes
    if not (num_classes := check_classes(num_classes or 0)):
        raise ValueError(
            f"the head {call.name!r} needs num_classes: how many there are, 150 in ADE20k"
        )
    # Families that cannot leave their last norm out keep it, and it takes no part.
    last_norm = wanted.normalised or "last_norm" in find_model(name).options.fixed
    if overrides.get("last_norm", last_norm) != last_norm:
        raise ValueError(
            f"last_norm={overrides['last_norm']} does not go with the head {call.name!r}, which "
            "determines it: leave it out"
        )
    backbone = create_backbone(
        name,
        described,
        num_classes=0,
        seed=seed,
        dtype=dtype,
        overrides={**overrides, "last_norm": last_norm},
        **settings,
    )
    if problem := _problem(wanted, backbone):
        serving = [other for other in HEADS if not _problem(HEADS[other].family, backbone)]
        raise ValueError(
            f"the head {call.name!r} takes {problem} of {name}: use {' or '.join(serving)}, or "
            "another model"
        )
    rngs, dtypes = nnx.Rngs(seed + 1), dtypes_of(jnp.dtype(dtype))
    neck, widths, blocks = _neck(wanted, backbone, blocks, rngs=rngs, dtypes=dtypes)
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
    model.head_notation, model.trained_size = head, backbone.trained_size
    return model


def _problem(head: type[Head], backbone: Backbone) -> str | None:
    """What a head takes and what this backbone has instead, in words; None if it serves."""
    stages = len(backbone.parts())
    if head.strides is None:
        return "one map, not the four" if backbone.own_maps else None
    strides = ", ".join(map(str, head.strides))
    if backbone.own_maps or stages in (1, len(head.strides)):
        return None
    return f"maps of strides {strides}, not those of the {stages} stages"


def _neck(
    head: type[Head],
    backbone: Backbone,
    blocks: Sequence[int] | None,
    *,
    rngs: nnx.Rngs,
    dtypes: dict,
) -> tuple[nnx.Module | None, list[int], tuple[int, ...] | None]:
    """The neck between backbone and head, the channels of the head's maps, and their blocks."""
    stages = [part.position.stage for part in backbone.parts().values()]
    widths, depth = [stage.channels for stage in stages], sum(stage.depth for stage in stages)
    single, count = head.strides is None, 1 if head.strides is None else len(head.strides)
    if blocks is not None and (backbone.own_maps or len(stages) > 1):
        raise ValueError(
            f"blocks={tuple(blocks)} are of isotropic models: those of {backbone.name} are the "
            "last of every stage; leave them out"
        )
    if backbone.own_maps:
        return None, widths * count, None
    if len(stages) > 1 and not single:
        epsilon = backbone.options.norm_epsilon
        return StageNorms(widths, epsilon, rngs=rngs, dtypes=dtypes), widths, None
    if blocks is None:
        blocks = (depth - 1,) if single else third_blocks(depth)
    blocks = tuple(blocks)
    ascending = sorted({*blocks}) == [*blocks]
    if len(blocks) != count or not ascending or blocks[0] < 0 or blocks[-1] >= depth:
        words = "one block" if single else "four blocks"
        raise ValueError(
            f"the head takes the maps of {words}, not {blocks} of the {depth} of "
            f"{backbone.name}, from 0 and in ascending order: change blocks, or use a deeper model "
            "or another head"
        )
    if single:
        return None, widths[-1:], blocks
    return FourScales(widths[0], rngs=rngs, dtypes=dtypes), widths * count, blocks
