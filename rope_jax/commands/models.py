"""Prints the models: default scheme, image size, classes and parameters.

    python -m rope_jax.models 'deit3*'

Without a pattern, all are listed.
"""

import math

from flax import nnx

from rope_jax.commands.arguments import command_parser
from rope_jax.models import list_models
from rope_jax.models.registry import find_model
from rope_jax.names.text import format_table
from rope_jax.weights.create import create_model

HEADER = ("model", "position", "pixels", "classes")


def rows(names: list[str]) -> list[tuple[str, ...]]:
    """A row of `HEADER` for each model: its name and the defaults of `create_model`."""
    entries = [(name, find_model(name)) for name in names]
    return [(name, e.position, str(e.image_size), str(e.num_classes)) for name, e in entries]


def parameters(name: str, *, position: str | None = None, part: str | None = None) -> str:
    """Counts the trainable parameters of a model or of a part of it, without creating them."""
    model = nnx.eval_shape(lambda: create_model(name, position=position))
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return f"{sum(math.prod(x.shape) for path, x in params if part is None or part in path):,}"


def main(arguments: list[str] | None = None) -> None:
    """Prints the table.

    >>> main(["vit_s16*"])
    model       position    pixels  classes
    ----------  ----------  ------  -------
    vit_s16     axial_rope     224     1000
    vit_s16_h6  axial_rope     224     1000
    """
    parser = command_parser("rope_jax.models", __doc__)
    parser.add_argument("pattern", nargs="?", default="*", help="of names, with *, ? and [...]")
    parser.add_argument(
        "--parameters", action="store_true", help="count parameters; one second per model"
    )
    args = parser.parse_args(arguments)
    names = list_models(args.pattern)
    if not names:
        parser.error(f"no model is called {args.pattern!r}; without it, all are listed")
    header, cells = HEADER, rows(names)
    if args.parameters:
        header = (*header, "parameters")
        cells = [(*row, parameters(row[0])) for row in cells]
    print(format_table(header, cells))
