"""Metadata of saved weights: the properties of their model, and how to create it again.

Different models may have weights of the same names and shapes.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from flax import nnx

from rope_jax.models.description import Description
from rope_jax.positions import Position
from rope_jax.positions.grids import Grid
from rope_jax.positions.scheme import SCHEMES

# Options of models and schemes that weights do not depend on.
_IGNORED = {
    # In training only.
    *("attention_dropout", "drop_path", "drop_path_schedule", "performer_dropout"),
    *("augments", "jitter", "shift", "rescale", "perturbation"),
    *("global_shift", "global_scale", "local_shift"),
    *("dropout", "auxiliary_weight", "loss_points"),  # of heads
    *("layer_scale", "std", "token_std"),  # initial values
    *("scan_layers", "remat", "pad_compat"),  # how blocks run
    *("window_size", "grow", "shrink", "resampler"),  # how tables are resized
    "pairing",  # converted
}
# Options in which a backbone of dense prediction may differ from its classifier.
_OF_CLASSIFIERS = {
    *("class_token", "last_norm"),
    *("attention", "global_blocks", "window_padding", "window_box"),
    "norm_epsilon",  # Segmenter's code has 1e-5 with weights trained with 1e-6
}


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The model that a file's weights belong to, as plain JSON.

    Attributes:
        family: class of the model.
        options: of the model, without those that weights do not depend on.
        position: name and settings of each scheme of a sum or wrapper, in alphabetical order.
        grids: (rows, columns) of the map or window of each table, by its name in the file.
        description: the arguments that create the model again; older files have none.
    """

    family: str
    options: dict[str, Any]
    position: list[Any]
    grids: Mapping[str, Grid]
    description: Description | None = None

    @classmethod
    def from_model(cls, model: nnx.Module, grids: Mapping[str, Grid]) -> "Metadata":
        """The metadata of a model whose tables are for maps of `grids`."""
        position = next(iter(model.parts().values())).position
        names = {scheme: name for name, scheme in SCHEMES.items()}
        settings = sorted(
            (
                [names[type(module)], options_of_weights(vars(module))]
                for _, module in nnx.iter_modules(position)
                if isinstance(module, Position) and type(module) in names
            ),
            key=json.dumps,
        )
        options = options_of_weights(dataclasses.asdict(model.options))
        if getattr(model, "head_notation", None) is not None:
            head_options = options_of_weights(dataclasses.asdict(model.head.options))
            options |= {f"head.{name}": value for name, value in head_options.items()}
        description = Description.from_model(model)
        return cls(family_name(model), options, settings, dict(grids), description)

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
            stored = entries.get("description")
            description = None if stored is None else Description.from_entries(stored)
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
        """Differences between the weights' model and `model` on which weights depend.

        A backbone of dense prediction may have windows that the classifier had not (ViTDet), no
        class token or last norm, and another epsilon of its norms (Segmenter).
        """
        current = json.loads(Metadata.from_model(model, {}).to_json())
        pairs = [("family", self.family, current["family"])]
        for name, value in current["options"].items():
            if name in self.options and not (backbone and name in _OF_CLASSIFIERS):
                pairs.append((name, self.options[name], value))
        pairs.append(("position", self.position, current["position"]))
        return [
            f"{name} is {file} there and {here} here" for name, file, here in pairs if file != here
        ]


def family_name(model: nnx.Module) -> str:
    """Name of the class of a model; of one that adds to a family's classifiers, of that family."""
    kind = type(model)
    return (kind.__base__ if getattr(kind, "beyond_classifier", ()) else kind).__name__


def options_of_weights(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a model or scheme that weights depend on: numbers, strings and tuples."""
    return {
        name: value
        for name, value in sorted(values.items())
        if isinstance(value, str | int | float | tuple | None)
        and name not in _IGNORED
        and not name.startswith("_")
    }
