"""What the papers train: a run of a recipe as published, or of a small model in its place."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Literal

from rope_jax.config import with_arguments

Scale = Literal["smoke", "small", "released", "full"]
Task = Literal["classify", "segment", "detect", "mask"]

# Names of --data, by recipe: what the runs at full scale are trained on.
_DATA = {"cct": "cifar", "dino": "coco", "mask_rcnn": "coco", "upernet": "ade20k",
         "mask2former": "ade20k", "segmenter": "ade20k"}  # fmt: skip
_TASKS: Mapping[str, Task] = {
    "dino": "detect", "mask_rcnn": "mask", "upernet": "segment", "mask2former": "segment",
    "segmenter": "segment",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """A model that a paper trains.

    Attributes:
        model, position, options: as in the cells of its tables; options are those of the model
            that differ from the recipe's.
        recipe: of `configs`, with its arguments other than position.
        after: the run from whose weights it starts.
    """

    model: str
    position: str
    recipe: str = ""
    options: str = ""
    after: "Run | None" = None

    @property
    def task(self) -> Task:
        """The task of its model."""
        return _TASKS.get(self.recipe_name, "classify")

    @property
    def data(self) -> str:
        """The images that it is trained on: "imagenet", "cifar10", "coco" or "ade20k"."""
        if self.recipe_name == "cct":
            return "cifar100" if "cifar100" in self.recipe else "cifar10"
        return _DATA.get(self.recipe_name, "imagenet")

    @property
    def recipe_name(self) -> str:
        """The recipe without its arguments."""
        return self.recipe.partition(":")[0]

    @property
    def sized(self) -> str:
        """The key by which its test sizes are collected."""
        return f"{self.recipe_name} {self.model}"

    @property
    def stages(self) -> "list[Run]":
        """The runs before it, and itself."""
        return [*(self.after.stages if self.after else []), self]

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which --only selects it."""
        return tuple(filter(None, (self.model, self.position, self.options)))

    def with_position(self, position: str) -> "Run":
        """Returns the run with another scheme in all stages."""
        after = self.after and self.after.with_position(position)
        return dataclasses.replace(self, position=position, after=after)

    def full_name(self) -> str:
        """The name of its folder at full scale.

        >>> Run("deit3_s16", "rope2d", "deit3:variant=s").full_name()
        'deit3-s-rope2d'
        """
        recipe, _, arguments = self.recipe.partition(":")
        words = [word.partition("=")[2] for word in arguments.split(",") if word]
        return "-".join(filter(None, [recipe, *words, self.position, self.options]))

    def full_words(self, data: Mapping[str, str], seed: int | None, before: str) -> list[str]:
        """The words of `rope_jax train` that train it as published, without its workdir.

        Args:
            data: name of the images -> their path.
            seed: None for the recipe's.
            before: workdir of the run that it starts from.
        """
        arguments = {"position": self.position}
        if seed is not None:
            arguments["seed"] = seed
        if self.after is not None and "stage=finetune" in self.recipe:
            arguments["init_from"] = before
        words = [
            f"--config={with_arguments(self.recipe, **arguments)}",
            f"--config.data.path={data.get(self.data, self.data.upper())}",
        ]
        if self.after is not None and "init_from" not in arguments:
            words.append(f"--config.init_from={before}")
        if self.options:
            words.append(f"--config.model.options={self.options}")
        return words


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A small model in place of a family's; S, B and L of a family have one.

    Attributes:
        family: its name in folders.
        model: whose options are changed.
        tiny, small: these options at the scales smoke and small.
        side: of the training images in pixels, where the paper has 224 (CCT: 32).
        tile: test sides are its multiples; None for half, one or two times the training side.
    """

    family: str
    model: str
    tiny: str
    small: str
    side: int = 32
    tile: int | None = 8

    def size(self, side: int, trained: int) -> int:
        """The test size in place of a paper's, in pixels.

        >>> stand_in("deit3_b16").size(384, 224), stand_in("swin_t").size(384, 224)
        (56, 64)
        """
        if self.tile is None:
            return int(self.side * 2.0 ** round(math.log2(side / trained)))
        return max(1, round(self.side * side / trained / self.tile)) * self.tile

    def on_photographs(self) -> "StandIn":
        """Returns the stand-in with patches of half the side: 4 of 32 pixels."""
        if "patch_size" not in self.small:
            return self
        side = rf"\g<1>{self.tile // 2}"
        halve = lambda text: re.sub(r"(patch_size=)\d+", side, text)
        return dataclasses.replace(
            self, tiny=halve(self.tiny), small=halve(self.small), tile=self.tile // 2
        )


def _plain(patch: int, more: str = "", depth: int = 2) -> tuple[str, str]:
    tiny = f"patch_size={patch},width=64,depth={depth},heads=1"
    return f"{tiny}{more}", f"patch_size={patch},width=128,depth=4,heads=2{more}"


def _stages(more: str) -> tuple[str, str]:
    rest = f"mlp_ratio=2.0,drop_path=0.0,{more}"
    tiny = f"width=32,depths=(1,1),heads=(1,2),{rest}"
    return tiny, f"width=64,depths=(2,2),heads=(2,4),{rest}"


_SIZES = ("width=64,depth=1,heads=1", "width=128,depth=4,heads=2")
_MLP = ",mlp_ratio=2.0,drop_path=0.0"
# The first pattern of a model's name that matches.
_STAND_INS = {
    # 64 channels a head, as k_rope=16 needs.
    r"vit_s16.*|vit_b16": StandIn("vit", "vit_s16", *_plain(8, _MLP, depth=1)),
    r"deit3_.*": StandIn("deit3", "deit3_ti16", *_plain(8, f"{_MLP},layer_scale=None")),
    r"deit_.*": StandIn("deit", "deit_ti16", *_plain(16, _MLP), side=64, tile=16),
    r"resformer_.*": StandIn("resformer", "resformer_ti16", *_plain(8, _MLP)),
    # Four stages, whose maps dense prediction needs.
    r"swin_.*": StandIn(
        "swin",
        "swin_t",
        f"width=32,depths=(1,1,1,1),heads=(1,2,4,8){_MLP},window_size=4",
        f"width=64,depths=(2,2,2,1),heads=(2,4,8,16){_MLP},window_size=4",
        tile=32,
    ),
    r"nat_s_.*": StandIn("nat_s", "nat_s_tiny", *_stages("kernel_size=3")),
    r"dinat_s_.*": StandIn("dinat_s", "dinat_s_tiny", *_stages("kernel_size=3,dilations=(2,1)")),
    r"nat_.*": StandIn("nat", "nat_mini", *_stages("kernel_size=3")),
    r"dinat_.*": StandIn("dinat", "dinat_mini", *_stages("kernel_size=3,dilations=(2,1)")),
    r"t2t_.*": StandIn("t2t", "t2t_vit_7", "width=64,depth=2,heads=1", _SIZES[1], side=64, tile=16),
    r"ceit_.*": StandIn("ceit", "ceit_t", *_SIZES, tile=16),
    r"vit_lite_.*": StandIn("vit_lite", "vit_lite_7_4", *_SIZES, side=16),
    r"cvt_.*": StandIn("cvt", "cvt_7_4", *_SIZES, side=16),
    r"cct_.*": StandIn("cct", "cct_7_3x1", *_SIZES, side=16),
    r"cat_vit_.*": StandIn("cat_vit", "cat_vit_5", *_plain(8, depth=1)),
    r"cat_.*": StandIn("cat", "cat_5", *_plain(8)),
    r"dinov2_.*": StandIn(
        "dinov2", "dinov2_s14", *_plain(8, ",mlp_ratio=2.5,qkv_bias=False", depth=1)
    ),
    r"beit_.*": StandIn("beit", "beit_b16", *_plain(8, ",mlp_ratio=1.0", depth=1)),
    r"vit_adapter_.*": StandIn(
        "vit_adapter",
        "vit_adapter_ti16",
        "width=64,depth=2,heads=1,mlp_ratio=2.0,groups=(1,),added=last,deform_heads=1,"
        "prior_width=16",
        "width=128,depth=4,heads=2,mlp_ratio=2.0,groups=(0,1,2,3),deform_heads=2",
        side=64,
        tile=16,
    ),
}


@functools.cache
def stand_in(model: str) -> StandIn:
    """The small model in place of a model of the papers, or of the user's."""
    return next(small for name, small in _STAND_INS.items() if re.fullmatch(name, model))
