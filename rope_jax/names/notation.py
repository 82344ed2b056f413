"""The notation of schemes, augmentations and crops, and other texts that hold values.

Schemes (`--config.model.position`), augmentations (`--config.data.augment`) and evaluation crops
are written in one notation: `name`, `name(option=value, ...)`, sums `a+b`, and wrappers
`outer(inner(...))`. Values are whole numbers, numbers, True, False, or bare words.
"""

import ast
import dataclasses
from collections.abc import Collection
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


def parse(text: str, name: str) -> tuple[Call, ...]:
    """Reads a sum of calls.

    >>> parse("axial_rope(k_rope=4)", "position")
    (Call(name='axial_rope', inner=(), options=(('k_rope', 4),)),)

    Args:
        text: in the notation above, which is one of Python's expressions.
        name: name of the setting, for error messages.

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
            f"{name}={text[:200]!r} cannot be read ({reason}): write name, "
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
    """A number, True or False; other names are words, even "inf" and "nan"."""
    if isinstance(node, ast.Name):
        return node.id
    value = ast.literal_eval(node)
    if value is None or type(value) in (int, float, bool):
        return "None" if value is None else value
    raise ValueError(f"{ast.unparse(node)} is neither a number nor a word")


def unordered(calls: tuple[Call, ...], ignored: Collection[str] = ()) -> frozenset:
    """A sum as nested sets, equal for the same schemes in any order of schemes and options.

    >>> first, second = (parse(x, "position") for x in ("ape(std=1)+rope2d", "rope2d+ape"))
    >>> unordered(first, ["std"]) == unordered(second)
    True

    Args:
        calls: of `parse`.
        ignored: options that make no difference.
    """
    return frozenset(
        (
            call.name,
            frozenset(option for option in call.options if option[0] not in ignored),
            tuple(unordered(inner, ignored) for inner in call.inner),
        )
        for call in calls
    )


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


def assignments(text: str, label: str) -> dict[str, str]:
    """Reads "a=1,b=f(x=2,y=3)"; commas and equal signs inside parentheses belong to the value.

    The last value of a key counts, as in a recipe's options followed by those of a command.

    >>> assignments("depth=6,window_size=(4,6)", "--config.model.options")
    {'depth': '6', 'window_size': '(4,6)'}

    Args:
        text: of the form key=value,...
        label: description of the text, for error messages.

    Raises:
        ValueError: a part is not of that form.
    """
    values = {}
    for piece in items(text):
        key, _, value = piece.partition("=")
        if not key.isidentifier() or not value:
            raise ValueError(f"{label} {piece!r} is not of the form key=value")
        values[key] = value
    return values


def literal(text: str) -> Any:
    """The value of a Python literal, or the text itself if it is not one."""
    try:
        return ast.literal_eval(text)
    # RecursionError and MemoryError: deeply nested text.
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
