"""Dense prediction: a backbone, a neck that makes the head's input maps, and the head."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rope_jax.models.backbone import Backbone, allow_any_mesh
from rope_jax.models.description import Description
from rope_jax.models.heads import HEADS, Head
from rope_jax.models.layers import check_images, layer_dtypes
from rope_jax.models.necks import NECKS, StageNorms
from rope_jax.models.pyramid import FeaturePyramid
from rope_jax.models.registry import Options, check_blocks, create_backbone, find_model
from rope_jax.names.notation import parse
from rope_jax.positions.grids import Grid
from rope_jax.system.sharding import explicit_mesh
from rope_jax_kernels import Pattern

_STRIDES = (4, 8, 16, 32)
"""Of the maps of backbones with four stages, or with maps of their own."""


class DenseModel(Backbone):
    """A backbone with a head of dense prediction.

    Attributes:
        backbone: without a classifier.
        neck: from the backbone's maps to the head's, or None where they are the same.
        head: from `rope_jax.models.heads`.
        blocks: blocks whose maps are used; None for the last of every stage.
        map_norm: the maps of blocks that the last norm normalises: `norm` of `features`.
        stages: stages whose maps are used, from 0; None for all.
    """

    def __init__(
        self,
        backbone: Backbone,
        neck: nnx.Module | None,
        head: Head,
        blocks: tuple[int, ...] | None = None,
        map_norm: bool | None = False,
        stages: tuple[int, ...] | None = None,
    ):
        self.backbone, self.neck, self.head = backbone, neck, head
        self.blocks, self.map_norm, self.stages = blocks, map_norm, stages
        self.task, self.padded = head.task, head.padded

    def features(
        self, images: Float[Array, "B h w 3"], **options: Any
    ) -> list[Float[Array, "B _H _W _C"]]:
        return self.backbone.features(images, **options)

    def head_maps(
        self, images: Float[Array, "B h w 3"], *, train: bool = False, key: Array | None = None
    ) -> list[Float[Array, "B _H _W _C"]]:
        """The maps that the head takes. Arguments as in `__call__`."""
        self.grids(check_images(images))
        selection = {"blocks": self.blocks, "norm": self.map_norm}
        maps = self.backbone.features(images, **selection, train=train, key=key)
        maps = maps if self.stages is None else [maps[stage] for stage in self.stages]
        return maps if self.neck is None else self.neck(maps, train)

    def predict(
        self,
        images: Float[Array, "B h w 3"],
        *,
        extent: Int[Array, "B 2"] | None = None,
        train: bool = False,
        key: Array | None = None,
        **extra: Any,
    ) -> Any:
        """The head's predictions, the input of the task's loss.

        Args:
            images, extent, train, key: as in `__call__`.
            extra: other arguments of the head.
        """
        if explicit_mesh(images) is not None:
            raise ValueError(
                "predict(...) returns arrays whose batch axis differs, so that their sharding "
                "cannot be stated on a mesh with Explicit axes: inside jax.set_mesh(mesh), call "
                "the loss as jax.sharding.auto_axes(loss, out_sharding=jax.P()), or use the mesh "
                "of rope_jax.system.sharding.make_mesh"
            )
        keys = self.training_keys(train, key, 2)
        if self.padded:
            extra |= {"extent": extent, "image_size": images.shape[1:3]}
        maps = self.head_maps(images, train=train, key=keys[0])
        return self.head(maps, train=train, key=keys[1], **extra)

    @allow_any_mesh
    def __call__(
        self,
        images: Float[Array, "B h w 3"],
        extent: Int[Array, "B 2"] | None = None,
        *,
        train: bool = False,
        key: Array | None = None,
    ) -> Any:
        """The head's result for images.

        For segmentation these are logits [B, h, w, classes] of all pixels, for detection
        `Detections`.

        Args:
            images: normalised, of any size that `grids` accepts.
            extent: rows and columns of images that are padded at the bottom and right, for
                detection; None without padding.
            train: whether to use dropout, augmented positions and batch statistics.
            key: for randomness in training; not needed in evaluation.
        """
        predictions = self.predict(images, extent=extent, train=train, key=key)
        return self.head.result(predictions, images.shape[1:3])

    def random_parts(self) -> list[str]:
        options = self.head.options
        draws = [name for name in options.draws if getattr(options, name) > 0]
        return [*super().random_parts(), *draws]

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

    def check_size(self, image_size: Grid) -> None:
        super().check_size(image_size)
        if not self.padded:
            return
        # Such heads refuse maps that are too small when they are called.
        graph, state = nnx.split(self)

        def run(state: nnx.State, images: Float[Array, "1 h w 3"]) -> None:
            nnx.merge(graph, state)(images)

        jax.eval_shape(run, state, jax.ShapeDtypeStruct((1, *image_size, 3), jnp.float32))

    def patterns(self, part: int, grid: Grid) -> list[Pattern]:
        return self.backbone.patterns(part, grid)

    def resize(self, image_size: int | Grid) -> None:
        self.backbone.resize(image_size)
        self.image_size = self.backbone.image_size

    def prepare(self, image_size: Grid) -> None:
        self.backbone.prepare(image_size)

    @property
    def options(self) -> Any:
        """Those of the backbone."""
        return self.backbone.options

    def scale_windows(self) -> None:
        self.backbone.scale_windows()

    def window_rule(self, *, scaled: bool = False) -> str | None:
        return self.backbone.window_rule(scaled=scaled)


def parse_head(head: str) -> tuple[str, type[Head], Options]:
    """The name, class and options of a head's text.

    >>> name, family, options = parse_head("upernet(width=512)")
    >>> name, family.task, options.width
    ('upernet', 'segmentation', 512)

    Raises:
        ValueError: it is not the text of one head, or there is no such head or option.
    """
    calls = parse(head, "head") if isinstance(head, str) else []
    if len(calls) != 1:
        raise ValueError(f"head={head!r} must be the text of one head, such as 'upernet'")
    name, entry = calls[0].name, HEADS[calls[0].name]
    return name, entry.family, entry.options.override(f"the head {name!r}", dict(calls[0].options))


def third_blocks(depth: int) -> tuple[int, ...]:
    """The blocks of a plain ViT whose outputs become four maps: 3, 5, 7, 11 of 12.

    >>> third_blocks(12), third_blocks(24)
    ((3, 5, 7, 11), (7, 11, 15, 23))

    Source: BEiT's segmentation, and Heo et al.; other depths in the same proportions.
    """
    return tuple(max(place, depth * sixths // 6 - 1) for place, sixths in enumerate((2, 3, 4, 6)))


def create_dense(description: Description, *, seed: int, dtype: Any) -> DenseModel:
    """Creates a backbone with a head, with initial weights."""
    name, family, head_options = parse_head(description.head)
    if not description.num_classes:
        raise ValueError(f"the head {name!r} needs num_classes: how many there are, 150 in ADE20k")
    norm, last_norm = _norms(name, description)
    options = {**description.options, "last_norm": last_norm}
    classless = dataclasses.replace(description, num_classes=0, options=options)
    backbone = create_backbone(classless, seed=seed, dtype=dtype)
    if not _serves(family, backbone):
        strides = family.strides and f"maps of strides {', '.join(map(str, family.strides))}"
        serving = [
            other
            for other, entry in HEADS.items()
            if entry.family.task == family.task and _serves(entry.family, backbone)
        ]
        raise ValueError(
            f"the head {name!r} takes {strides or 'one map'}, which {description.name} does not "
            f"have: use {' or '.join([*serving, 'another model'])}"
        )
    settings = {"rngs": nnx.Rngs(seed + 1), "dtypes": layer_dtypes(jnp.dtype(dtype))}
    neck, channels, blocks, stages = _find_input(
        family, head_options, backbone, description.blocks, **settings
    )
    classes = description.num_classes
    head = family(head_options, channels=tuple(channels), num_classes=classes, **settings)
    # Maps of every stage have norms of their own, of the neck or the backbone.
    norm = False if blocks is None else norm
    model = DenseModel(backbone, neck, head, blocks, norm, stages)
    model.name, model.notation = description.name, description.position
    model.head_notation, model.image_size = description.head, description.image_size
    model.trained_size = description.trained_size
    model.trained_options = backbone.trained_options
    return model


def _norms(head: str, description: Description) -> tuple[bool | None, bool]:
    """The maps of blocks that are normalised, as `norm` of `Backbone.features`, and `last_norm`.

    With last_norm=True a head of maps that are not normalised takes the last one normalised
    (mmsegmentation's "ln" models).
    """
    normalised, entry = HEADS[head].family.normalised, find_model(description.name)
    if "last_norm" in entry.options.fixed:  # it takes no part where maps are not normalised
        return normalised, description.options.get("last_norm", True)
    last_norm = description.options.get("last_norm", normalised)
    if normalised and not last_norm:
        raise ValueError(
            f"last_norm=False cannot be combined with the head {head!r}, which needs normalised "
            "maps: leave it out"
        )
    if normalised or not last_norm:
        return normalised, last_norm
    if entry.family.hierarchical or entry.family.own_maps:
        raise ValueError(
            f"last_norm=True cannot be combined with the head {head!r} on {description.name}, "
            "whose maps have norms of their own: leave it out"
        )
    return None, True


def _serves(head: type[Head], backbone: Backbone) -> bool:
    """Whether this backbone has the maps that a head takes."""
    has_four = backbone.own_maps or len(backbone.parts()) in (1, len(_STRIDES))
    return has_four if head.strides else not backbone.own_maps


def _find_input(
    head: type[Head],
    options: Options,
    backbone: Backbone,
    blocks: Sequence[int] | None,
    *,
    rngs: nnx.Rngs,
    dtypes: dict,
) -> tuple[nnx.Module | None, list[int], tuple[int, ...] | None, tuple[int, ...] | None]:
    """Finds the input of a head with these options in the maps of a backbone.

    Returns:
        The neck between backbone and head, the channels of the head's maps, and `blocks` and
        `stages` as of `DenseModel`.
    """
    stages = [part.position.stage for part in backbone.parts().values()]
    widths, depth = [stage.channels for stage in stages], sum(stage.depth for stage in stages)
    offers = "maps" if backbone.own_maps else "stages" if len(stages) > 1 else "blocks"
    needs = "map" if head.strides is None else "pyramid" if head.scales else "maps"
    # A model of stages whose head takes one map is saved with the block of that map.
    saved = needs == "map" and blocks is not None and tuple(blocks) == (depth - 1,)
    if blocks is not None and offers != "blocks" and not saved:
        raise ValueError(
            f"blocks={tuple(blocks)} are of isotropic models: those of {backbone.name} are the "
            "last of every stage; leave them out"
        )
    kind = getattr(options, "neck", "deconv")
    if kind != "deconv" and offers != "blocks":
        raise ValueError(
            f"neck={kind} is of isotropic models: the maps of {backbone.name} have the sizes that "
            "the head takes; leave it out"
        )
    settings = {"rngs": rngs, "dtypes": dtypes}
    if offers == "blocks" or needs == "map":
        blocks = _blocks(backbone.name, depth, blocks, single=needs != "maps")
    match offers, needs:
        case _, "map":
            return None, widths[-1:], blocks, None
        case "blocks", "maps":
            make = NECKS[kind]
            neck = make and make(widths[0], **settings)
            return neck, widths * len(head.strides), blocks, None
        case "blocks", "pyramid":
            pyramid = {"outputs": options.width, "scales": head.scales, "dtype": dtypes["dtype"]}
            neck = FeaturePyramid(widths[0], **pyramid, rngs=rngs)
            return neck, [options.width] * len(head.strides), blocks, None
    chosen = tuple(i for i, stride in enumerate(_STRIDES) if stride in head.strides)
    channels = [(widths * len(_STRIDES))[stage] for stage in chosen]
    norms = (
        None
        if offers == "maps"
        else StageNorms(channels, backbone.options.norm_epsilon, **settings)
    )
    return norms, channels, None, chosen


def _blocks(
    name: str, depth: int, blocks: Sequence[int] | None, *, single: bool
) -> tuple[int, ...]:
    """Checks the blocks whose maps are used, a `single` one or four, or returns the default."""
    count = 1 if single else len(_STRIDES)
    if depth < count:
        raise ValueError(
            f"the head takes the maps of {count} blocks, and {name} has {depth}: use a deeper "
            "model or another head"
        )
    if blocks is None:
        blocks = (depth - 1,) if single else third_blocks(depth)
    check_blocks("blocks", blocks, depth, count)
    return tuple(blocks)
