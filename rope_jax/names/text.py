"""Text for users: the notation of schemes and augmentations, image sizes, hints, tables.

Schemes (`--config.model.position`), augmentations (`--config.data.augment`) and evaluation crops
are written in one notation: `name`, `name(option=value, ...)`, sums `a+b`, and wrappers
`outer(inner(...))`. Values are whole numbers, numbers, True, False, or bare words.
"""

import ast
import dataclasses
import difflib
import numbers
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

Value = int | float | bool | str


@dataclasses.dataclass(frozen=True)
class Call:
    """One `name(...)` as written.

    Attributes:
        name: before the parenthesis.
        inner: the sums inside the parentheses.
        options: (option, value) pairs in the order in which they were written.
    """

    name: str
    inner: tuple[tuple["Call", ...], ...] = ()
    options: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        """The call in the notation.

        >>> str(Call("rope2d", options=(("base", 50), ("k_rope", 4))))
        'rope2d(base=50,k_rope=4)'
        """
        inside = ["+".join(map(str, calls)) for calls in self.inner]
        inside += [f"{option}={value}" for option, value in self.options]
        return f"{self.name}({','.join(inside)})" if inside else self.name


def parse(text: str, what: str) -> tuple[Call, ...]:
    """Reads a sum of calls.

    >>> parse("axial_rope(k_rope=4)", "position")
    (Call(name='axial_rope', inner=(), options=(('k_rope', 4),)),)

    Args:
        text: in the notation above, which is one of Python's expressions.
        what: name of the setting, for error messages.

    Raises:
        ValueError: the text does not follow the notation.
    """
    try:
        if "#" in text:
            raise ValueError("it has a comment")
        return _sum(ast.parse(" ".join(text.split()), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(
            f"{what}={text[:200]!r} cannot be read ({reason}): write name, "
            "name(option=value, ...), a+b or outer(inner)"
        ) from None


def _sum(node: ast.expr) -> tuple[Call, ...]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _sum(node.left) + _sum(node.right)
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise ValueError(f"{ast.unparse(call.func)} is no name")
    options = [(option.arg, _value(option.value)) for option in call.keywords]
    if len(dict(options)) < len(options) or None in dict(options):
        raise ValueError(f"{call.func.id} has an option twice, or without a name")
    return (Call(call.func.id, tuple(map(_sum, call.args)), tuple(options)),)


def _value(node: ast.expr) -> Value:
    """A number, True or False; other names are words, not even "inf" and "nan" are numbers."""
    if isinstance(node, ast.Name):
        return node.id
    value = ast.literal_eval(node)
    if value is None or type(value) in (int, float, bool):
        return "None" if value is None else value
    raise ValueError(f"{ast.unparse(node)} is neither a number nor a word")


def items(text: str) -> list[str]:
    """Splits at commas outside parentheses.

    >>> items("ape,axial_rope(k_rope=4,shared=True)+ape")
    ['ape', 'axial_rope(k_rope=4,shared=True)+ape']
    """
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece for piece in map(str.strip, pieces) if piece]


def assignments(text: str, what: str) -> dict[str, str]:
    """Reads "a=1,b=f(x=2,y=3)"; commas and equal signs inside parentheses belong to the value.

    >>> assignments("depth=6,window_size=(4,6)", "--config.model.options")
    {'depth': '6', 'window_size': '(4,6)'}

    Args:
        text: of the form key=value,...
        what: description of the text, for error messages.

    Raises:
        ValueError: a part is not of that form.
    """
    found = {}
    for piece in items(text):
        key, _, value = piece.partition("=")
        if not key.isidentifier() or not value:
            raise ValueError(f"{what} {piece!r} is not of the form key=value")
        found[key] = value
    return found


def literal(text: str) -> Any:
    """The value of a Python literal, or the text itself if it is not one."""
    try:
        return ast.literal_eval(text)
    # RecursionError and MemoryError: deeply nested text.
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


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
    whole = all(isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in pair)
    if len(pair) != 2 or not whole or min(pair) < 1:
        raise ValueError(
            f"image size {size!r} must be a positive number of pixels, 224, "
            "or a height and a width, (224, 320) or 224x320"
        )
    return int(pair[0]), int(pair[1])


def size_text(size: Sequence[int]) -> str:
    """A resolution in words: "224x320" for (224, 320)."""
    return f"{size[0]}x{size[1]}"


def other_command(module: str) -> str:
    """How the user calls a command that is not running, for hints.

    >>> other_command("rope_jax.data.verify")  # or "rope_jax data verify", under `rope_jax`
    'python -m rope_jax.data.verify'
    """
    called = sys.argv[0].startswith("rope_jax ")
    return module.replace(".", " ") if called else f"python -m {module}"


def closest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word: one that it begins, or the closest one, then all of them.

    >>> closest("appe", ["ape", "none"])
    "did you mean 'ape'? known: ape, none"
    >>> closest("pos", ["epochs", "position"])
    "did you mean 'position'? known: epochs, position"
    """
    known = list(known)
    begun = [name for name in known if word and name.startswith(word)]
    close = begun or difflib.get_close_matches(word, known, 1)
    return (
        f"did you mean {close[0]!r}? " if close else ""
    ) + f"known: {', '.join(known) or 'none'}"


def nearest(word: str, known: Iterable[str], count: int = 3) -> str:
    """The known words that are most like an unknown one, for a hint among many.

    >>> nearest("swin_tiny", ["swin_t", "swin_s", "nat_mini", "deit_s16"], 2)
    "the nearest are 'swin_t', 'swin_s'"
    """
    close = difflib.get_close_matches(word, list(known), count, cutoff=0.0)
    return f"the nearest are {', '.join(map(repr, close))}"


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
