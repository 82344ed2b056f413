"""The allowed values of options: conversion and description by their annotations.

Settings, options of models, heads, schemes and augmentations, arguments of recipes and of commands
declare their values in the same way, so that every wrong value gives an error of the same form:

    width: Annotated[int, Range(low=1)] = 64
    join: Literal["add", "concat"] | None = None
"""

import dataclasses
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from rope_jax.names.notation import literal
from rope_jax.names.text import closest


@dataclasses.dataclass(frozen=True)
class Range:
    """The bounds of a number, in `Annotated`.

    >>> print(Range(low=0, below=1))
    of at least 0 and below 1

    Attributes:
        low, high: inclusive bounds, if any.
        above, below: exclusive bounds, if any.
    """

    low: int | float = -math.inf
    high: int | float = math.inf
    above: int | float = -math.inf
    below: int | float = math.inf

    def __contains__(self, number: int | float) -> bool:
        return self.low <= number <= self.high and self.above < number < self.below

    def __str__(self) -> str:
        bounds = {
            "of at least": self.low,
            "above": self.above,
            "at most": self.high,
            "below": self.below,
        }
        limits = [f"{word} {bound}" for word, bound in bounds.items() if math.isfinite(bound)]
        return " and ".join(limits)


class Words(str):
    """A description of allowed values that replaces the annotation's own, in `Annotated`."""


Count = Annotated[int, Range(low=1)]
CountOrZero = Annotated[int, Range(low=0)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(low=0)]
Probability = Annotated[float, Range(low=0, high=1)]
Rate = Annotated[float, Range(low=0, below=1)]
Share = Annotated[float, Range(above=0, high=1)]

_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}
_UNIONS = (types.UnionType, typing.Union)  # X | None has the second origin from Python 3.14 on
_MISFIT = object()


def convert(value: Any, annotation: Any, where: str = "") -> Any:
    """Converts a value to the type of an annotation.

    Numbers are converted where their value does not change, lists become tuples, and the word
    "None" becomes None where that is allowed.

    >>> convert(2, float | None), convert([1.0, 2], tuple[int, ...]), convert("None", int | None)
    (2.0, (1, 2), None)
    >>> convert(-1, Annotated[float, Range(above=0)], "--stride")
    Traceback (most recent call last):
    ValueError: --stride must be a number above 0, not -1

    Args:
        value: anything.
        annotation: of a type, None, or made of these by `|`, `Union`, `Optional`, `Literal`,
            `tuple`, and `Annotated` with `Range`. Numbers are finite.
        where: name of the value, for the error message.

    Raises:
        ValueError: the annotation does not allow the value.
    """
    converted = _fit(value, annotation)
    if converted is _MISFIT:
        raise ValueError(f"{where} must be {describe(annotation)}, not {value!r:.200}".lstrip())
    return converted


def read(text: str, annotation: Any, where: str = "") -> Any:
    """Converts text, which may be the value itself or a literal of Python.

    >>> read("2", float), read("2", str), read("None", int | None), read("007", int)
    (2.0, '2', None, 7)
    """
    if annotation is bool and text in ("true", "false"):
        text = text.capitalize()
    value = literal(text) if _fit(text, annotation) is _MISFIT else text
    if isinstance(value, str) and value.isdecimal() and _fit(value, annotation) is _MISFIT:
        value = int(value)  # with leading zeros, which Python's literals may not have
    return convert(value, annotation, where)


def _fit(value: Any, annotation: Any) -> Any:
    """The converted value, or _MISFIT."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        fitting = _fit(value, parts[0])
        number = isinstance(fitting, int | float)
        bounds = [rule for rule in parts[1:] if isinstance(rule, Range) and number]
        return fitting if all(fitting in bound for bound in bounds) else _MISFIT
    if isinstance(value, str) and value == "None" and (None in parts or type(None) in parts):
        return None
    if origin in _UNIONS:
        fitting = [fit for part in parts if (fit := _fit(value, part)) is not _MISFIT]
        exact = [fit for fit in fitting if type(fit) is type(value)]
        return next(iter(exact + fitting), _MISFIT)
    if origin is Literal:
        exact = [word for word in parts if (type(word), word) == (type(value), value)]
        return next(iter(exact), _MISFIT)
    if (origin or annotation) is tuple:
        return _fit_tuple(value, parts)
    if annotation in (bool, int, float):
        return _fit_number(value, annotation)
    kind = type(None) if annotation is None else origin or annotation
    return value if kind is Any or isinstance(value, kind) else _MISFIT


def _fit_tuple(value: Any, parts: tuple) -> Any:
    if not isinstance(value, tuple | list):
        return _MISFIT
    if not parts or parts[-1] is ...:
        parts = (parts or (Any,))[:1] * len(value)
    if len(parts) != len(value):
        return _MISFIT
    fitting = tuple(map(_fit, value, parts))
    return _MISFIT if any(part is _MISFIT for part in fitting) else fitting


def _fit_number(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value if type(value) is kind is bool else _MISFIT
    try:
        number = kind(value)
    except (ValueError, OverflowError):  # not finite, or too large for a float
        return _MISFIT
    if kind is float:
        return number if math.isfinite(number) else _MISFIT
    integral = isinstance(value, numbers.Integral) or (kind is int and abs(value) <= 2**53)
    return number if integral and number == value else _MISFIT


def describe(annotation: Any) -> str:
    """The values that an annotation allows, in words.

    >>> describe(Annotated[float, Range(above=0)] | None), describe(Literal["near", "far"])
    ('a number above 0, or None', 'one of near, far')
    """
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        custom = [rule for rule in parts[1:] if isinstance(rule, Words)]
        bounds = [str(rule) for rule in parts[1:] if isinstance(rule, Range)]
        return " ".join([*(custom or [describe(parts[0])]), *bounds])
    if origin in _UNIONS:
        words = " or ".join(describe(part) for part in parts if part is not type(None))
        return f"{words}{', or None' * (type(None) in parts)}"
    if origin is Literal:
        words = ", ".join(str(word) for word in parts if word is not None)
        return f"one of {words}{', or None' * (None in parts)}"
    if origin is tuple:
        number = "a tuple of values" if parts[-1] is ... else f"{len(parts)} values"
        return f"{number}, each {describe(parts[0])}"
    if annotation in (None, type(None)):
        return "None"
    return _NAMES.get(annotation) or getattr(annotation, "__name__", str(annotation))


def find_options(owner: Callable) -> dict[str, Any]:
    """The options of a dataclass or a function, and their annotations.

    Options of a function are its keyword-only parameters except `rngs`. One without an annotation
    has the type of its default.

    >>> find_options(lambda image, *, pad=4: image)
    {'pad': <class 'int'>}
    """
    if dataclasses.is_dataclass(owner):
        hints = typing.get_type_hints(owner, include_extras=True)
        return {field.name: hints[field.name] for field in dataclasses.fields(owner)}
    parameters = inspect.signature(owner, eval_str=True).parameters.values()
    plain = int | float | bool | str
    default_type = lambda value: type(value) if isinstance(value, plain) else plain | None
    return {
        p.name: default_type(p.default) if p.annotation is p.empty else p.annotation
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.name != "rngs"
    }


def convert_options(
    owner: str, values: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of some options, converted.

    >>> convert_options("crop", {"pad": 2.0}, {"pad": int})
    {'pad': 2}

    Args:
        owner: of the options, for error messages.
        values: by option.
        options: the annotations of all options.

    Raises:
        ValueError: an unknown option, or a value that its annotation does not allow.
    """
    for name in values:
        if name not in options:
            raise ValueError(f"{owner} has no option {name!r}; {closest(name, options)}")
    return {
        name: convert(value, options[name], f"{owner}: {name}") for name, value in values.items()
    }
