"""The parts of the experiment `evidence`: models, recipes and image sets."""

import dataclasses
import itertools
import operator
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rope_jax import data
from rope_jax.config import Config, load_recipe, resolve, settings

INNER = ("ape", "sincos1d", "sincos2d")
_LAPE = [scheme for inner in INNER for scheme in (inner, f"lape({inner})")]
FRACTIONS = [f"axial_rope(k_rope={k})" for k in (1, 2, 4, 8)]
_SUMS = ["axial_rope(shared=True)", "rope_mixed+ape", "rope_mixed+rpb"]
SCHEMES = ["none", *_LAPE, "rpb", "rope2d", "rope_mixed", *FRACTIONS, *_SUMS]
_BASIC = ["none", "rpb", "axial_rope"]
_STAGED = [*_BASIC, "rope2d", "rope_mixed", "ape", "lape(ape)", "rope_mixed+rpb"]
_COMPACT = ("vit_lite_7_4", "cvt_7_4", "cct_7_3x1")

Model = tuple[str, str | None]  # backbone, and scheme (None for the backbone's default)


class Run(NamedTuple):
    """One training command: a backbone with a scheme, and its seeds."""

    backbone: str
    position: str | None
    seeds: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """The runs on one image set.

    Attributes:
        recipe: name of a recipe in `configs/`.
        groups: the models; all seeds of a group are trained before the next group.
        images: function of the path of --data and a file to write, which returns the .npz file of
            the images.
        name: name of the file to write.
        backbone: the recipe's argument for the backbone.
        seeds: default of --seeds.
        together: True to train all seeds in one run, one run at a time (on a GPU).
        smaller: sides in pixels below the training resolution at which schemes are compared.
        larger: sides in pixels above the training resolution.
        extended: models that are also evaluated with every rule of the experiment `extend`.
        augment: the recipe's argument for augmentations, if it has one.
    """

    recipe: str
    groups: Sequence[Sequence[Model]]
    images: Callable[[pathlib.Path, pathlib.Path], pathlib.Path]
    name: str
    backbone: str = "backbone"
    seeds: tuple[int, ...] = (0, 1, 2)
    together: bool = False
    smaller: tuple[int, ...] = ()
    larger: tuple[int, ...] = ()
    extended: Sequence[Model] = ()
    augment: str | None = None

    @property
    def models(self) -> list[Model]:
        """All models of the part."""
        return [model for group in self.groups for model in group]

    def runs(self, seeds: Sequence[int]) -> list[Run]:
        """Returns all runs in the order in which they start."""
        seed_groups = [tuple(seeds)] if self.together else [(seed,) for seed in seeds]
        return [
            Run(*model, run_seeds)
            for group in self.groups
            for run_seeds in seed_groups
            for model in group
        ]

    def folder(self, run: Run, flags: Sequence[str] = ()) -> str:
        """Name of a run's workdir, which differs for other flags, seeds or parts."""
        more = [flag.removeprefix("--config.").replace("/", "_") for flag in flags]
        model = [run.backbone, run.position or "default", *map(str, run.seeds)]
        return "-".join([self.name, *model, *more])

    def _recipe(self, **options: Any) -> str:
        options["augment"] = self.augment
        arguments = [f"{key}={value}" for key, value in options.items() if value is not None]
        return f"{self.recipe}:{','.join(arguments)}"

    def commands(
        self, run: Run, images: pathlib.Path, workdir: pathlib.Path, flags: Sequence[str] = ()
    ) -> list[list[str]]:
        """Returns the commands of a run, one after the other."""
        options = {self.backbone: run.backbone, "position": run.position, "seed": run.seeds[0]}
        folder = workdir / self.folder(run, flags)
        train = ["rope_jax.main", f"--config={self._recipe(path=images, **options)}"]
        train.append(f"--workdir={folder}")
        if self.together:
            train += ["--config.data.on_device=True", f"--config.seeds={len(run.seeds)}"]
        commands = [[*train, *flags]]
        if (run.backbone, run.position) in self.extended:
            extend = ["experiments", "extend", str(folder), f"--out={folder / 'extend.json'}"]
            commands.append([*extend, f"--images={RULE_IMAGES}"])
        return [[sys.executable, "-m", *command] for command in commands]

    def design(self, backbone: str) -> dict[str, Any]:
        """The model of a backbone, its batch size, and its settings that are not the default.

        The settings that differ between its runs, scheme and seed, are left out.

        >>> PARTS["fashion"].design("vit")["batch_size"]
        48
        """
        config = resolve(load_recipe(self._recipe(**{self.backbone: backbone})))
        changed = {}
        for name, field in settings().items():
            read = operator.attrgetter(name)
            value, default = read(config), read(Config())
            affects = not field.metadata["resumable"] or name == "eval.resolutions"
            differs = affects and value != default and name not in ("model.position", "seed")
            if differs or name in ("model.name", "batch_size"):
                changed[name] = list(value) if isinstance(value, tuple) else value
        return changed


def to_pixels(file: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """Returns an .npz file of pixels; decodes a file of concatenated JPEGs into one.

    A file of pixels has the arrays train_images uint8 [n, H, W, 3], train_labels, test_images and
    test_labels, and is returned unchanged.

    A file of JPEGs has an array `body`, with image k from offsets[k] to offsets[k + 1], without its
    first bytes, which images have in common. These are in `header`, or in one of several
    pieces of it, from header_offsets[i] to header_offsets[i + 1] with i = header_id[k]. `split` is
    0 for training images and 1 for test images; without it, the first 50,000 are for training.
    `labels` are renumbered from 0 without gaps.

    Args:
        file: the file to read.
        path: the file to write.
    """
    stored = dict(np.load(file))
    if "train_images" in stored:
        return file
    body, offsets, header = stored["body"].tobytes(), stored["offsets"], stored["header"].tobytes()
    starts = stored.get("header_offsets", [0, len(header)])
    header_ids = stored.get("header_id", np.zeros(len(offsets) - 1, int))
    headers = [header[start:end] for start, end in itertools.pairwise(starts)]
    pieces = zip(header_ids, itertools.pairwise(offsets), strict=True)
    images = np.stack([data.decode_image(headers[i] + body[a:b]) for i, (a, b) in pieces])
    labels = np.unique(stored["labels"], return_inverse=True)[1].astype(np.int32)
    split = stored.get("split", np.arange(len(labels)) >= 50_000)
    arrays = {}
    for number, name in enumerate(("train", "test")):
        arrays[f"{name}_images"] = images[split == number]
        arrays[f"{name}_labels"] = labels[split == number]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name("incomplete.npz")
    np.savez(temporary, **arrays)
    return temporary.replace(path)


_CAT: list[Model] = [("cat", None), ("cat_no_imprint", None), ("cat_vit", None)]
_CIFAR: list[Model] = [
    *itertools.product(_COMPACT, ("ape", "lape(ape)")),  # as in LaPE
    *itertools.product(_COMPACT, ("none", "axial_rope", "rope_mixed")),
]
RULE_IMAGES = 2_000  # test images of the rules, which are evaluated at many sizes
_LENGTHS = [f"axial_rope(k_rope={k})" for k in (1, 4, 8)]
# Questions that few runs can answer come first.
_FASHION_GROUPS = [
    [("vit", "none"), ("vit", "rpb"), ("vit", FRACTIONS[1])],
    [("vit", position) for position in ("ape", "rope2d", "rope_mixed")],
    [("vit", "lape(ape)"), *(("vit", position) for position in _LAPE[2:])],
    _CAT,
    [("swin", position) for position in _BASIC],
    [("vit", position) for position in _LENGTHS],
    [("vit", "rope_mixed+ape")],
]
PARTS = {
    "fashion": Part(
        "fashion_mnist",
        _FASHION_GROUPS,
        lambda folder, _: folder,  # the recipe reads the folder itself
        "fashion",
        seeds=(0, 1, 2, 3, 4),
        smaller=(16, 20, 24),
        larger=(32, 40, 48),
        extended=[
            ("vit", position)
            for position in ("rope2d", "rope_mixed", FRACTIONS[1], "rope_mixed+ape")
        ],
    ),
    # Tests whether figure 4 of Heo et al. needs their random crops, with objects of many sizes.
    "fashion_crops": Part(
        "fashion_mnist",
        [[("vit", "ape"), ("vit", "rope2d")]],
        lambda folder, _: folder,  # the recipe reads the folder itself
        "fashion_crops",
        smaller=(16, 20, 24),
        larger=(32, 40, 48),
        augment="resized_crop(scale_min=0.25)",
    ),
    "cifar10": Part(
        "cct",
        [_CIFAR],
        to_pixels,
        "cifar10",
        backbone="variant",
        seeds=(121, 122, 123),
        together=True,
        smaller=(24,),
        larger=(40, 48, 64),
    ),
    "tiny_imagenet": Part(
        "tiny_imagenet",
        [
            [("vit", position) for position in SCHEMES]
            + [(backbone, position) for position in _STAGED for backbone in ("swin", "nat")]
        ],
        to_pixels,
        "tiny_imagenet",
        together=True,
        smaller=(32, 48),
        larger=(80, 96, 112, 128, 144, 160),
    ),
}
