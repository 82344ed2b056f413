"""The weights that the authors of the models published: what `pretrained=True` stands for.

`released.json` has a row for each. The first row of a model and position is the default: the one
that the papers used, where there is one, else the model trained on ImageNet-1k at its own size.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rope_jax.models.description import Description, Preprocessing, as_option
from rope_jax.models.registry import MODELS, find_model
from rope_jax.names.notation import parse
from rope_jax.names.text import image_pair
from rope_jax.system.files import cache_folder
from rope_jax.weights.download import download
from rope_jax.weights.files import EXTENSIONS, HUB_FILES, WeightsFile, open_weights


@dataclasses.dataclass(frozen=True)
class ReleasedWeights:
    """Published weights of a model.

    Attributes:
        model, position: as for `create_model`.
        tag: name of the hub repository or file; also what follows its first dot.
        where: hub id, address of the file, or address of a page from which a person gets the file.
        source: naming convention, see `convert_state_dict`.
        licence: of the weights.
        num_classes, image_size: None for the model's own.
        options: of the model, as the file needs them; "head" is that of dense prediction.
        preprocessing: what the weights expect of images: that of the paper, where there is one.
        published: results, each with `top1`, `miou` or `box_ap` in percent, `by` whom it was
            published, and in most cases the `resolution`.
        paper_rows: rows of the papers' tables and figures that these weights reproduce.
        file: name in the cache, of weights that are not on the hub; with * for the hash in it.
    """

    model: str
    position: str
    tag: str
    where: str
    source: str
    licence: str | None
    num_classes: int | None
    image_size: int | None
    options: Mapping[str, Any]
    preprocessing: Preprocessing
    published: tuple[Mapping[str, Any], ...]
    paper_rows: tuple[str, ...]
    file: str | None = None

    @property
    def head(self) -> str | None:
        """The name of the head of dense prediction; None for a classifier."""
        return self.options.get("head")

    @property
    def description(self) -> Description:
        """The arguments of `create_model` for these weights."""
        model = find_model(self.model)
        return Description(
            self.model,
            self.position,
            model.num_classes if self.num_classes is None else self.num_classes,
            image_pair(self.image_size or model.image_size),
            {name: value for name, value in self.options.items() if name != "head"},
            self.preprocessing,
            head=self.head,
        )

    @contextlib.contextmanager
    def open(self, folder: str | os.PathLike | None = None) -> Iterator[WeightsFile]:
        """Opens the file, which is downloaded into the cache if it is not there.

        Args:
            folder: where it is looked for first, under its name; that of a hub repository in a
                folder of the repository's name: "vit_small_patch16_rope_224.naver_in1k/
                model.safetensors".

        Raises:
            FileNotFoundError: it cannot be downloaded; the message says what to do.
            ImportError: the package that downloads it is not installed.
            ValueError: it is not a file of weights, or damaged.
        """
        with open_weights(self._fetch(folder)) as file:
            yield dataclasses.replace(
                self.complete(file), preprocessing=self.preprocessing, where=self.tag
            )

    def complete(self, file: WeightsFile) -> WeightsFile:
        """This file, with what it does not say itself."""
        return dataclasses.replace(
            file,
            source=file.source or self.source,
            preprocessing=file.preprocessing or self.preprocessing,
        )

    def _fetch(self, folder: str | os.PathLike | None) -> str:
        """The path of the file in the folder or the cache, or a hub id."""
        cache = cache_folder() / "weights"
        repository = self.where.rpartition("/")[2]
        names = [self.file] if self.file else [f"{repository}/{name}" for name in HUB_FILES]
        for place in [cache] if folder is None else [pathlib.Path(folder), cache]:
            if paths := [path for name in names for path in sorted(place.glob(name))]:
                return str(paths[0])
        if self.file is None:
            return self.where
        if not self.where.endswith(self.file):
            raise FileNotFoundError(
                f"{self.tag}: get {self.file} from {self.where} and save it in {cache}"
            )
        download(self.where, cache / self.file)
        return str(cache / self.file)


@functools.cache
def _released() -> tuple[ReleasedWeights, ...]:
    text = pathlib.Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    return tuple(
        ReleasedWeights(
            **row
            | {
                "options": {name: as_option(value) for name, value in row["options"].items()},
                "preprocessing": Preprocessing(**{k: as_option(v) for k, v in how.items()}),
                "published": tuple(row["published"]),
                "paper_rows": tuple(row["paper_rows"]),
            }
        )
        for row in json.loads(text)
        for how in [row["preprocessing"]]
    )


def list_weights(
    pattern: str = "*", *, position: str | None = None, paper: str | None = None
) -> list[ReleasedWeights]:
    """The published weights, those that `pretrained=True` takes first.

    >>> [weights.tag for weights in list_weights("deit3_s16", position="rope_mixed")]
    ['naver_in1k', 'rope_mixed_deit_small_patch16_LS']

    Args:
        pattern: of the names of models, with `*`, `?` and `[...]`.
        position: of the models.
        paper: "heo", "thesis", ...: those that serve rows of its tables or figures.

    Returns:
        `ReleasedWeights`, each with `model`, `position`, `tag`, `where`, `licence`, `published`
        results in percent, `paper_rows`, `options`, `preprocessing`, and `open()`.
    """
    return [
        weights
        for weights in _released()
        if fnmatch.fnmatchcase(weights.model, pattern)
        and (position is None or parse(weights.position, "position") == parse(position, "position"))
        and (paper is None or any(row.startswith(f"{paper}/") for row in weights.paper_rows))
    ]


def find_weights(
    model: str, tag: str | bool, *, position: str | None = None, head: str | None = None
) -> ReleasedWeights:
    """The published weights of a model.

    >>> find_weights("deit3_s16", True, position="rope_mixed").where
    'timm/vit_small_patch16_rope_mixed_224.naver_in1k'

    Args:
        model: its name.
        tag: of the weights; True for the default.
        position: of the model; None for that of the tag, or with True the model's default.
        head: of dense prediction, with options if any: weights of a classifier where there are none
            with it; None for weights of a classifier, or with a tag for any.

    Raises:
        ValueError: there are none, or the tag is that of several positions; the message names those
            that there are.
    """
    default = find_model(model).position  # which refuses an unknown model
    if position is None and tag is True:
        position = default
    weights = list_weights(model, position=position)
    name = None if head is None else parse(head, "head")[0].name
    if tag is True:
        fitting = [w for w in weights if w.head in (name, None)]
    else:
        fitting = [w for w in weights if tag in (w.tag, w.tag.partition(".")[2])]
    fitting = [w for w in fitting if w.head == name] or fitting
    if not fitting:
        raise ValueError(_none_found(model, tag, position, weights))
    positions = dict.fromkeys(w.position for w in fitting)
    if len(positions) > 1:
        raise ValueError(
            f"pretrained={tag!r} of {model} are weights of several positions: add position=, one "
            f"of {', '.join(positions)}"
        )
    return fitting[0]


def _none_found(
    model: str, tag: str | bool, position: str | None, weights: Sequence[ReleasedWeights]
) -> str:
    """A message about what there is instead."""
    if not list_weights(model):
        return f"pretrained={tag!r}: no weights of {model} are public"
    if not weights:
        positions = ", ".join(dict.fromkeys(w.position for w in list_weights(model)))
        return (
            f"pretrained={tag!r}: no weights of {model} with position={position!r} are public; "
            f"there are some with {positions}"
        )
    tags = ", ".join(w.tag for w in weights)
    return f"pretrained={tag!r}: {model} has no weights of that name; there are {tags}"


def listed_file(model: str, where: Any) -> ReleasedWeights | None:
    """The published weights of a model that a hub id, or the name of a file, names; None if none.

    >>> listed_file("deit_b16", "downloads/deit_base_patch16_384-8de9b5d1.pth").image_size
    384

    Raises:
        ValueError: they are those of another model of its family, in which the tensors may have the
            same names and shapes.
    """
    if not isinstance(where, str | os.PathLike):
        return None
    where = os.fspath(where)
    name = os.path.basename(where)
    rows = {
        weights.model: weights
        for weights in reversed(_released())
        if where == weights.where or fnmatch.fnmatchcase(name, weights.file or "")
    }
    if model in rows or model not in MODELS:
        return rows.get(model)
    family = find_model(model).family
    if others := [other for other in rows if find_model(other).family is family]:
        raise ValueError(
            f"pretrained={where!r} names weights of {others[0]}, not of {model}: create that model"
        )
    return None


def names_released(pretrained: object) -> bool:
    """Whether `pretrained` of `create_model` is True or a tag, and not a path or a hub id."""
    if not isinstance(pretrained, str):
        return pretrained is True
    is_path = os.path.exists(pretrained) or "/" in pretrained
    return not is_path and os.path.splitext(pretrained)[1] not in EXTENSIONS
