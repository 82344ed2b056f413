"""Metadata of saved weights: a description of their model.

Different models may have weights of the same names and shapes.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from flax import nnx

from rope_jax.positions import Position
from rope_jax.positions.grids import Grid
from rope_jax.positions.scheme import SCHEMES

# Options of models and schemes that weights do not depend on.
_IGNORED = {"attention_dropout", "drop_path", "drop_path_schedule", "performer_dropout"}
_IGNORED |= {"augments", "jitter", "shift", "rescale", "perturbation"}  # in training only, too
_IGNORED |= {"global_shift", "global_scale", "local_shift"}
_IGNORED |= {"layer_scale", "std", "token_std"}  # initial values
_IGNORED |= {"scan_layers", "pad_compat"}  # how blocks run
_IGNORED |= {"window_size", "grow", "shrink", "resampler"}  # how tables are resized
_IGNORED |= {"pairing"}  # converted


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The model that a file's weights belong to, as plain JSON.

    Attributes:
        family: class of the model.
        options: of the model, without those that weights do not depend on.
        position: name and settings of each scheme of a sum or wrapper, in alphabetical order.
        grids: (rows, columns) of the map or window of each table, by its name in the file.
    """

    family: str
    options: dict[str, Any]
    position: list[Any]
    grids: Mapping[str, Grid]

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
        return cls(type(model).__name__, options, sorted(settings, key=json.dumps), grids)

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
            return cls(str(entries["family"]), options, position, grids)
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

    def check(self, model: nnx.Module, path: str) -> None:
        """Raises ValueError if the weights at `path` belong to a different model."""
        own = json.loads(Metadata.of(model, {}).to_json())
        pairs = [("family", self.family, own["family"])]
        for name, value in own["options"].items():
            if name in self.options:
                pairs.append((name, self.options[name], value))
        pairs.append(("position", self.position, own["position"]))
        other = [
            f"{what} is {file} there and {here} here" for what, file, here in pairs if file != here
        ]
        if other:
            raise ValueError(
                f"pretrained={path!r} holds the weights of another model: {'; '.join(other)}. "
                "Create the model that was saved, or pass the arrays to "
                "rope_jax.convert_state_dict, which checks names and shapes only"
            )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, strings and tuples that weights depend on."""
    return {
        name: value
        for name, value in sorted(values.items())
        if isinstance(value, str | int | float | tuple | None)
        and name not in _IGNORED
        and not name.startswith("_")
    }
