"""Prints every positional scheme: formula, properties, source, and its parameters in a model.

    python -m rope_jax.positions --model=deit3_s16

Without a model, no parameters are counted.
"""

import functools
import textwrap

from rope_jax.commands.arguments import command_parser
from rope_jax.commands.models import parameters
from rope_jax.models.registry import find_model
from rope_jax.positions.scheme import ACTS, RESOLUTION, SCHEMES

HEADER = ("scheme", "formula", "acts", "at other resolutions", "source")


def rows() -> list[tuple[str, ...]]:
    """Returns a row of `HEADER` for each scheme, sorted by name."""
    table_rows = []
    for name, cls in sorted(SCHEMES.items()):
        text = f"{name}(ape)" if cls.wraps else name
        paper = vars(cls).get("paper", "")  # not the paper of a base class
        table_rows.append((text, cls.equation, ACTS[cls.acts], RESOLUTION[cls.resolution], paper))
    return table_rows


def count_parameters(model: str, position: str) -> str:
    """Counts a scheme's trainable parameters in a model; "refused" if it is not defined there."""
    try:
        return parameters(model, position=position, part="position")
    except ValueError:
        return "refused"


def listing(model: str | None = None) -> str:
    """The table as lines of at most 100 characters: what a scheme does, its formula, its source.

    >>> listing().splitlines()[0].split("; ")[1]
    'at other resolutions: extrapolated: the same step per patch'

    Args:
        model: name of a model, in which the scheme's parameters are counted.
    """
    lines = []
    for name, equation, acts, resolution, paper in rows():
        counted = "" if model is None else f" ({count_parameters(model, name)} parameters)"
        indented = functools.partial(textwrap.wrap, width=100, subsequent_indent=" " * 6)
        lines += indented(f"{name}{counted}: {acts}; at other resolutions: {resolution}")
        lines += indented(equation, initial_indent=" " * 4)
        lines += indented(paper, initial_indent=" " * 4)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = command_parser("rope_jax.positions", __doc__)
    parser.add_argument(
        "--model", help="count the scheme's parameters in this model, see rope_jax.list_models()"
    )
    flags = parser.parse_args(arguments)
    with parser.one_line_errors():
        if flags.model is not None:
            find_model(flags.model)
    print(listing(flags.model))
