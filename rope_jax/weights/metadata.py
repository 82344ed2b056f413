"""Metadata of saved weights: what their model is, and all that creates it again.

Different models may have weights of the same names and shapes.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from flax import nnx

from rope_jax.names import plugins
from rope_jax.positions import Position
from rope_jax.positions.grids import Grid
from rope_jax.positions.scheme import SCHEMES
from rope_jax.weights.tables import Preprocessing

# Options of models and schemes that weights do not depend on.
_IGNORED = {"attention_dropout", "drop_path", "drop_path_schedule", "performer_dropout"}
_IGNORED |= {"augments", "jitter", "shift", "rescale", "perturbation"}  # in training only, too
_IGNORED |= {"global_shift", "global_scale", "local_shift"}
_IGNORED |= {"layer_scale", "std", "token_std"}  # initial values
_IGNORED |= {"scan_layers", "pad_compat"}  # how blocks run
_IGNORED |= {"window_size", "grow", "shrink", "resampler"}  # how tables are resized
_IGNORED |= {"pairing"}  # converted
_IGNORED |= {"dropout", "auxiliary_weight", "loss_points"}  # of heads, in training only
CLASSIFIER_OPTIONS = ("class_token", "last_norm")
"""Options of parameters that a backbone of dense prediction may lack, and its classifier has."""
# All options in which it may differ from its classifier.
_OF_CLASSIFIERS = {*CLASSIFIER_OPTIONS}
_OF_CLASSIFIERS |= {"attention", "global_blocks", "window_padding", "window_box"}
_OF_CLASSIFIERS |= {"norm_epsilon"}  # Segmenter's code has 1e-5 with weights trained with 1e-6


@dataclasses.dataclass(frozen=True)
class Description:
    """The arguments of `create_model` that create a model again, and what goes with its weights.

    Attributes:
        name: of the model.
        position: text of its scheme.
        num_classes: outputs of the head; 0 without one.
        image_size: (height, width) in pixels, for which its position tables are.
        options: all options of its family.
        preprocessing: what the weights expect of images, where known.
        class_names: of the logits, where known.
        plugins: modules that it may need (`rope_jax.plugins`).
        head: text of its head of dense prediction; None for a classifier.
        blocks: whose maps that head takes; None for the last of every stage.
        trained_size: (height, width) in pixels from which its rotations extend.
    """

    name: str
    position: str
    num_classes: int
    image_size: Grid
    options: Mapping[str, Any]
    preprocessing: Preprocessing | None = None
    class_names: tuple[str, ...] | None = None
    plugins: tuple[str, ...] = ()
    head: str | None = None
    blocks: tuple[int, ...] | None = None
    trained_size: Grid | None = None

    def __post_init__(self):
        if self.trained_size is None:
            object.__setattr__(self, "trained_size", self.image_size)

    @classmethod
    def of(cls, model: nnx.Module) -> "Description | None":
        """The description of a model; None for one that `create_model` did not create."""
        if model.name is None:
            return None
        head = model.head_notation
        blocks = None if head is None else model.blocks
        options = dataclasses.asdict(model.options)
        about = (model.num_classes, model.image_size, options, model.preprocessing)
        needed = plugins.needed(f"{model.name} {model.notation} {head or ''}")
        named = {"plugins": needed, "head": head, "blocks": blocks}
        named |= {"class_names": model.class_names, "trained_size": model.trained_size}
        return cls(model.name, model.notation, *about, **named)

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "Description":
        """The description stored as JSON; KeyError, TypeError or ValueError for anything else."""
        height, width = map(int, entries["image_size"])
        how, names = entries["preprocessing"], entries["class_names"]
        head, blocks = entries.get("head"), entries.get("blocks")  # older files have none
        trained = entries.get("trained_size")
        if how is not None:
            how = Preprocessing(
                tuple(map(float, how["mean"])),
                tuple(map(float, how["std"])),
                float(how["crop"]),
                str(how["interpolation"]),
            )
        return cls(
            str(entries["name"]),
            str(entries["position"]),
            int(entries["num_classes"]),
            (height, width),
            {name: _as_option(value) for name, value in dict(entries["options"]).items()},
            how,
            None if names is None else tuple(map(str, names)),
            tuple(map(str, entries["plugins"])),
            None if head is None else str(head),
            None if blocks is None else tuple(map(int, blocks)),
            None if trained is None else (int(trained[0]), int(trained[1])),
        )


def _as_option(value: Any) -> Any:
    """The value of an option, whose sequences are tuples."""
    return tuple(map(_as_option, value)) if isinstance(value, list) else value


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The model that a file's weights belong to, as plain JSON.

    Attributes:
        family: class of the model.
        options: of the model, without those that weights do not depend on.
        position: name and settings of each scheme of a sum or wrapper, in alphabetical order.
        grids: (rows, columns) of the map or window of each table, by its name in the file.
        description: all that creates the model again; older files have none.
    """

    family: str
    options: dict[str, Any]
    position: list[Any]
    grids: Mapping[str, Grid]
    description: Description | None = None

    @classmethod
    def of(cls, model: nnx.Module, grids: Mapping[str, Grid]) -> "Metadata":
        """The metadata of a model whose tables are of `grids`."""
        position = next(iter(model.parts().values())).position
        names = {scheme: name for name, scheme in SCHEMES.items()}
        settings = [
            [names[type(module)], _plain(vars(module))]
            for _, module in nnx.iter_modules(position)
            if isinstance(module, Position) and type(module) in names
        ]
        options = _plain(dataclasses.asdict(model.options))
        if getattr(model, "head_notation", None) is not None:
            own = _plain(dataclasses.asdict(model.head.options))
            options |= {f"head.{name}": value for name, value in own.items()}
        settings = sorted(settings, key=json.dumps)
        return cls(family_of(model), options, settings, dict(grids), Description.of(model))

    def to_json(self) -> str:
        """Text for a file."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str, path: str) -> "Metadata":
        """Reads what `to_json` wrote into the file at `path`; ValueError for anything else."""
        try:
            entries = json.loads(text)
            grids = {key: (int(h), int(w)) for key, (h, w) in entries["grids"].items()}
            options, position = dict(entries["options"]), list(entries["position"])
            about = entries.get("description")
            description = None if about is None else Description.from_entries(about)
            return cls(str(entries["family"]), options, position, grids, description)
        except (
            AttributeError,
            KeyError,
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(
                f"pretrained={path!r} has metadata about its model that cannot be read: {error!r}"
            ) from None

    def differences(self, model: nnx.Module, *, backbone: bool = False) -> list[str]:
        """How the model of the weights differs from `model`, in what weights depend on.

        A backbone of dense prediction may have windows that the classifier had not (ViTDet), no
        class token or last norm, and another epsilon of its norms (Segmenter).
        """
        own = json.loads(Metadata.of(model, {}).to_json())
        pairs = [("family", self.family, own["family"])]
        for name, value in own["options"].items():
            if name in self.options and not (backbone and name in _OF_CLASSIFIERS):
                pairs.append((name, self.options[name], value))
        pairs.append(("position", self.position, own["position"]))
        return [
            f"{what} is {file} there and {here} here" for what, file, here in pairs if file != here
        ]


def family_of(model: nnx.Module) -> str:
    """Name of the class of a model; of one that adds to a family's classifiers, of that family."""
    kind = type(model)
    return (kind.__base__ if getattr(kind, "beyond_classifier", ()) else kind).__name__


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, strings and tuples that weights depend on."""
    return {
        name: value
        for name, value in sorted(values.items())
        if isinstance(value, str | int | float | tuple | None)
        and name not in _IGNORED
        and not name.startswith("_")
    }
