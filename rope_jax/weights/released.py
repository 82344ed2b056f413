"""The weights that the authors of the models published: what `pretrained=True` stands for.

`released.json` has a row for each. The first row of a model and position is the default: the one
that the papers used, where there is one, else the model trained on ImageNet-1k at its own size.
Rows with a head of dense prediction follow those of classifiers.
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
from rope_jax.models.registry import find_model
from rope_jax.names.notation import parse, unordered
from rope_jax.names.text import image_pair
from rope_jax.system.files import cache_folder
from rope_jax.weights.download import download, hub_file
from rope_jax.weights.files import (
    EXTENSIONS,
    HUB_FILES,
    WeightsFile,
    open_weights,
    plain_hub_id,
)


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
    def tags(self) -> tuple[str, ...]:
        """The tag, and what follows its first dot."""
        return tuple(filter(None, (self.tag, self.tag.partition(".")[2])))

    @property
    def is_page(self) -> bool:
        """True if `where` is a page, from which only a person gets the file."""
        return self.file is not None and os.path.splitext(self.where)[1] not in EXTENSIONS

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
            FileNotFoundError: it cannot be downloaded, or there is no such folder; the message says
                what to do.
            PermissionError: the hub's repository is gated.
            ImportError: the package that downloads it is not installed.
            ValueError: it is not a file of weights, or damaged.
        """
        with open_weights(self.locate(folder)) as file:
            yield dataclasses.replace(self.describe(file), where=self.tag)

    def describe(self, file: WeightsFile) -> WeightsFile:
        """Adds what the list knows to a file of these weights."""
        if file.metadata is not None:  # of a model that was saved under this name
            return file
        return dataclasses.replace(
            file,
            source=file.source or self.source,
            preprocessing=self.preprocessing,
            listed=self.description,
        )

    def locate(self, folder: str | os.PathLike | None = None) -> str:
        """The path of the file, which is downloaded as by `open`."""
        cache = cache_folder() / "weights"
        if folder is not None and not os.path.isdir(folder):
            raise FileNotFoundError(f"weights_dir={os.fspath(folder)}: there is no such folder")
        repository = self.where.rpartition("/")[2]
        names = [self.file] if self.file else [f"{repository}/{name}" for name in HUB_FILES]
        for place in [cache] if folder is None else [pathlib.Path(folder), cache]:
            if paths := [path for name in names for path in sorted(place.glob(name))]:
                return str(paths[0])
        if self.file is None:
            return hub_file(self.where, HUB_FILES)
        if self.is_page:
            raise FileNotFoundError(
                f"{self.tag}: get {self.file} from {self.where} (unpacked, if it is in an archive) "
                f"and save it under this name in {cache}, or in weights_dir"
            )
        download(self.where, cache / self.file)
        return str(cache / self.file)


@functools.cache
def _released() -> tuple[ReleasedWeights, ...]:
    text = pathlib.Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    return tuple(map(_read_row, json.loads(text)))


def _read_row(entries: dict[str, Any]) -> ReleasedWeights:
    options, preprocessing = (
        {name: as_option(value) for name, value in entries[key].items()}
        for key in ("options", "preprocessing")
    )
    lists = {name: tuple(entries[name]) for name in ("published", "paper_rows")}
    return ReleasedWeights(
        **entries | lists | {"options": options, "preprocessing": Preprocessing(**preprocessing)}
    )


def list_weights(
    pattern: str = "*", *, position: str | None = None, paper: str | None = None
) -> list[ReleasedWeights]:
    """The published weights, of each model and position those first that `pretrained=True` takes.

    >>> [weights.tag for weights in list_weights("deit3_s16", position="rope_mixed")]
    ['naver_in1k', 'rope_mixed_deit_small_patch16_LS']

    Args:
        pattern: of the names of models, with `*`, `?` and `[...]`.
        position: of the models; options on which weights do not depend make no difference.
        paper: "heo", "thesis", ...: those that serve rows of its tables or figures.

    Returns:
        `ReleasedWeights`, each with `model`, `position`, `tag`, `where`, `licence`, `published`
        results in percent, `paper_rows`, `options`, `preprocessing`, and `open()`.
    """
    asked = None if position is None else schemes_of_weights(position)
    return [
        weights
        for weights in _released()
        if fnmatch.fnmatchcase(weights.model, pattern)
        and (position is None or schemes_of_weights(weights.position) == asked)
        and (paper is None or any(row.startswith(f"{paper}/") for row in weights.paper_rows))
    ]


# Options of schemes on which weights do not depend.
_IGNORED = (
    "decay",
    "extend",
    "grow",
    "log_scale",
    "normalise",
    "pairing",
    "resize",
    "shrink",
    "std",
)


@functools.cache
def schemes_of_weights(position: str) -> frozenset:
    """The schemes of a position, without options on which weights do not depend."""
    return unordered(parse(position, "position"), _IGNORED)


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
    tagged = [w for w in weights if tag is True or tag in w.tags]
    with_head = [w for w in tagged if w.head == name]
    fitting = with_head or [w for w in tagged if w.head is None or tag is not True]
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
    if tag is True:
        heads = ", ".join(dict.fromkeys(w.head for w in weights))
        return f"pretrained=True: no classifier of {model} is public; add head={heads}"
    tags = ", ".join(w.tag for w in weights)
    hint = ", and paths and hub ids go to --weights in commands" if "/" in str(tag) else ""
    return f"pretrained={tag!r}: {model} has no weights of that name; there are {tags}{hint}"


def find_listed(where: Any) -> ReleasedWeights | None:
    """The published weights that a hub id, an address or the name of a file names; None if none.

    >>> find_listed("downloads/deit_base_patch16_384-8de9b5d1.pth").image_size
    384
    """
    if not isinstance(where, str | os.PathLike):
        return None
    where = plain_hub_id(os.fspath(where))
    name = os.path.basename(where)
    for weights in _released():
        by_place = where == weights.where and not weights.is_page
        if by_place or (weights.file and fnmatch.fnmatchcase(name, weights.file)):
            return weights
    return None


@contextlib.contextmanager
def open_listed(
    where: str | os.PathLike | WeightsFile | ReleasedWeights,
    folder: str | os.PathLike | None = None,
) -> Iterator[WeightsFile]:
    """Opens weights as `open_weights` does, with what the list knows of them.

    Args:
        where: as for `open_weights`, or published weights: a row of the list, the address or the
            name of its file.
        folder: see `ReleasedWeights.open`.

    Raises:
        ValueError: a folder is named, and the weights are not of the list; and as `open_weights`.
    """
    weights = where if isinstance(where, ReleasedWeights) else find_listed(where)
    if weights is not None and (weights is where or _is_fetched(os.fspath(where), weights)):
        with weights.open(folder) as file:
            yield file
        return
    if folder is not None:
        raise ValueError(
            f"weights_dir={os.fspath(folder)} holds published weights: name them by True, a tag "
            "or a hub id of the list (rope_jax.list_weights)"
        )
    with open_weights(where) as file:
        yield file if weights is None else weights.describe(file)


def _is_fetched(where: str, weights: ReleasedWeights) -> bool:
    """True if listed weights are named by their place, and not as a file that the user has."""
    named = plain_hub_id(where)
    return not os.path.exists(where) and named in (weights.where, os.path.basename(named))


def names_released(pretrained: object) -> bool:
    """Checks if `pretrained` of `create_model` is True or a tag, and not a path or a hub id."""
    if not isinstance(pretrained, str):
        return pretrained is True
    is_path = os.path.exists(pretrained) or "/" in pretrained
    return not is_path and os.path.splitext(pretrained)[1] not in EXTENSIONS
