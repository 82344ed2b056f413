"""Text for users: image sizes, hints, tables."""

import difflib
import numbers
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any


def image_pair(size: Any) -> tuple[int, int]:
    """(height, width) in pixels.

    >>> image_pair(224), image_pair((224, 320)), image_pair("224x320")
    ((224, 224), (224, 320), (224, 320))

    Args:
        size: a number of pixels, a pair of them, or such text as "224" and "224x320".

    Raises:
        ValueError: for anything else, and numbers below 1.
    """
    pair = size
    if isinstance(size, str):
        parts = size.split("x")
        pair = [int(part) if part.isdecimal() else 0 for part in parts]
        pair = pair * 2 if len(pair) == 1 else pair
    elif not isinstance(size, Sequence):
        pair = (size, size)
    integral = all(isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in pair)
    if len(pair) != 2 or not integral or min(pair) < 1:
        raise ValueError(
            f"image size {size!r} must be a positive number of pixels, 224, "
            "or a height and a width, (224, 320) or 224x320"
        )
    return int(pair[0]), int(pair[1])


def size_text(size: Sequence[int]) -> str:
    """A resolution in words: "224x320" for (224, 320)."""
    return f"{size[0]}x{size[1]}"


def other_command(module: str) -> str:
    """Formats another command in the way the user typed this one, for hints.

    >>> other_command("rope_jax.data.verify")  # or "rope_jax data verify", under `rope_jax`
    'python -m rope_jax.data.verify'
    """
    is_subcommand = sys.argv[0].startswith("rope_jax ")
    return module.replace(".", " ") if is_subcommand else f"python -m {module}"


def closest(word: str, names: Iterable[str]) -> str:
    """A hint for an unknown word: a name that starts with it, or the closest one, then all names.

    >>> closest("appe", ["ape", "none"])
    "did you mean 'ape'? known: ape, none"
    >>> closest("pos", ["epochs", "position"])
    "did you mean 'position'? known: epochs, position"
    """
    names = list(names)
    begun = [name for name in names if word and name.startswith(word)]
    close = begun or difflib.get_close_matches(word, names, 1)
    return (
        f"did you mean {close[0]!r}? " if close else ""
    ) + f"known: {', '.join(names) or 'none'}"


def nearest(word: str, names: Iterable[str]) -> str:
    """The names that are most similar to an unknown word, for a hint among many.

    >>> nearest("swin_tiny", ["swin_t", "swin_s", "nat_tiny", "deit_s16"])
    "the nearest are 'swin_t', 'nat_tiny', 'swin_s'"
    """
    close = difflib.get_close_matches(word, list(names), 3, cutoff=0.0)
    return f"the nearest are {', '.join(map(repr, close))}"


def find_line(error: BaseException) -> str:
    """The line at which an exception stopped a module, " (path/of/module.py, line 3)".

    Args:
        error: caught by the function that imported or called the module. A SyntaxError itself says
            where it is: "".
    """
    frames = traceback.extract_tb(error.__traceback__)[1:]
    frames = [frame for frame in frames if "importlib" not in frame.filename]
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    return f" ({frames[0].filename}, line {lines[-1]})" if lines else ""


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal: aligned columns, numbers to the right.

    >>> print(format_table(("size", "top-1"), [("8x8", "0.98"), ("16x16", "0.63")]))
    size   top-1
    -----  -----
      8x8   0.98
    16x16   0.63
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if re.match(r"[-+]?\d", cell) else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, each line with its line break."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
