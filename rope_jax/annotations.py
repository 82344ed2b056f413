"""Which values an annotation allows, alike in every release of Python and in every spelling.

The origin of `X | None` is `types.UnionType` before Python 3.14 and `typing.Union` from then on, as
that of `Optional[X]` and `Literal["a"] | None` has always been.
"""

import dataclasses
import types
import typing
from typing import Annotated, Any, Literal

_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values that an annotation allows. Its text describes them for error messages.

    >>> str(Kind((float,), optional=True)), str(Kind(words=("near", "far")))
    ('a number or None', 'one of near, far')

    Attributes:
        types: types other than None; of generic types with their arguments, such as `list[int]`.
        words: values of `Literal` other than None.
        optional: whether None is allowed.
        rules: what `Annotated` adds.
    """

    types: tuple[Any, ...] = ()
    words: tuple[Any, ...] = ()
    optional: bool = False
    rules: tuple[Any, ...] = ()

    def __str__(self) -> str:
        parts = [_NAMES.get(kind) or getattr(kind, "__name__", str(kind)) for kind in self.types]
        parts += [f"one of {', '.join(map(str, self.words))}"] * bool(self.words)
        return " or ".join([*parts, *["None"] * self.optional])

    def allows(self, value: Any) -> bool:
        """Whether a value is of one of the types itself, one of the words, or an allowed None."""
        return (
            Any in self.types
            or type(value) in [typing.get_origin(kind) or kind for kind in self.types]
            or (type(value), value) in [(type(word), word) for word in self.words]
            or (value is None and self.optional)
        )


def read(annotation: Any) -> Kind:
    """Reads an annotation.

    >>> read(float | None)
    Kind(types=(<class 'float'>,), words=(), optional=True, rules=())

    Args:
        annotation: a type, None, or one made of these by `|`, `Union`, `Optional`, `Literal` and
            `Annotated`; not its text, as which `from __future__ import annotations` stores it
            (`inspect.signature(..., eval_str=True)` and `typing.get_type_hints` evaluate that).
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        inner = read(arguments[0])
        return dataclasses.replace(inner, rules=(*inner.rules, *arguments[1:]))
    if origin in (types.UnionType, typing.Union):
        parts = [read(argument) for argument in arguments]
        return Kind(
            tuple(kind for part in parts for kind in part.types),
            tuple(word for part in parts for word in part.words),
            any(part.optional for part in parts),
            tuple(rule for part in parts for rule in part.rules),
        )
    if origin is Literal:
        return Kind((), tuple(word for word in arguments if word is not None), None in arguments)
    if annotation in (None, type(None)):
        return Kind(optional=True)
    return Kind((annotation,))
