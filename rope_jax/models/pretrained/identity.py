"""Of what model a file's weights are: what another model must agree in to compute the same with them."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from flax import nnx

from rope_jax.models.pretrained.rows import has_stages
from rope_jax.positions import Position
from rope_jax.positions.grids import Grid
from rope_jax.positions.scheme import SCHEMES

# Options and settings of schemes that weights do not depend on: what acts in training only, how layers are kept and run, the initial
# value of LayerScale (whether there is one shows in the names), how tables are resized and what then has another size, and the pairing
# of channels, which the converter permutes.
_FREE = {"attention_dropout", "drop_path", "drop_path_schedule", "scan_layers", "layer_scale", "window_size", "pad_compat"}
_FREE |= {"performer_dropout", "grow", "shrink", "resampler", "std", "token_std", "pairing"}
# Of coordinates, in training.
_FREE |= {"augments", "jitter", "shift", "rescale", "global_shift", "global_scale", "local_shift", "perturbation"}


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a file says of the model whose weights it holds; all of it is plain JSON.

    Attributes:
        family: class of the model.
        options: of the model, by name, but for those that weights do not depend on.
        position: name and settings of each scheme of a sum or wrapper, in alphabetical order.
        grids: of each table, (rows, columns) of the map or window for which it is made, by its name in the file.
    """

    family: str
    options: dict[str, Any]
    position: list[Any]
    grids: Mapping[str, Grid]

    def to_json(self) -> str:
        """Text for a file's metadata."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str, path: str) -> "Identity":
        """What `to_json` wrote into the file at `path`; ValueError for anything else."""
        try:
            says = json.loads(text)
            grids = {key: (int(rows), int(columns)) for key, (rows, columns) in says["grids"].items()}
            return cls(str(says["family"]), dict(says["options"]), list(says["position"]), grids)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"pretrained={path!r} says of what model its weights are in a way that cannot be read: {error}") from None

    def check(self, model: nnx.Module, path: str) -> None:
        """Refuses a model that computes something else with the weights of the file at `path`."""
        own = json.loads(identity_of(model, {}).to_json())
        pairs = [("family", self.family, own["family"])]
        pairs += [(name, self.options[name], value) for name, value in own["options"].items() if name in self.options]
        pairs += [("position", self.position, own["position"])]
        other = [f"{what} is {theirs} there and {ours} here" for what, theirs, ours in pairs if theirs != ours]
        if other:
            raise ValueError(
                f"pretrained={path!r} holds the weights of another model: {'; '.join(other)}. Create the model that was saved, or give the "
                "arrays to rope_jax.convert_state_dict, which asks for nothing but names and shapes"
            )


def identity_of(model: nnx.Module, grids: Mapping[str, Grid]) -> Identity:
    """What a file is to say of a model whose tables are of `grids`."""
    position = (model.stages[0] if has_stages(model) else model).position
    schemes = [module for _, module in nnx.iter_modules(position) if isinstance(module, Position)]
    names = {cls: name for name, cls in SCHEMES.items()}
    settings = sorted(([names[type(scheme)], _plain(vars(scheme))] for scheme in schemes if type(scheme) in names), key=json.dumps)
    return Identity(type(model).__name__, _plain(dataclasses.asdict(model.options)), settings, grids)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, words and tuples of them that weights depend on."""
    kept = {name: value for name, value in values.items() if isinstance(value, str | int | float | tuple | None)}
    return {name: value for name, value in sorted(kept.items()) if name not in _FREE and not name.startswith("_")}
