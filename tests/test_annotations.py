"""What annotations allow, in every spelling, on every Python."""

import dataclasses
import inspect
import typing
from typing import Annotated, Any, Literal, Optional, Union

import pytest

from rope_jax.annotations import Kind, read
from tests import postponed

NUMBER = Kind((float,), optional=True)
WORD = Kind(words=("4.4", "D.1"), optional=True)


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        (float, Kind((float,))),
        (None, Kind(optional=True)),
        (float | None, NUMBER),
        (None | float, NUMBER),
        (Optional[float], NUMBER),  # noqa: UP045
        (Union[float, None], NUMBER),  # noqa: UP007
        (int | float | None, Kind((int, float), optional=True)),
        (Literal["4.4", "D.1"], Kind(words=("4.4", "D.1"))),
        (Literal["4.4", "D.1"] | None, WORD),
        (Optional[Literal["4.4", "D.1"]], WORD),  # noqa: UP045
        (Literal["4.4", "D.1", None], WORD),
        (float | Literal["auto"], Kind((float,), ("auto",))),
        (list[Literal["a"]] | None, Kind((list[Literal["a"]],), optional=True)),
        (Optional[tuple[int, ...]], Kind((tuple[int, ...],), optional=True)),  # noqa: UP045
        (Annotated[float | None, "rule"], dataclasses.replace(NUMBER, rules=("rule",))),
        (
            Annotated[Annotated[float, "rule"] | None, "other"],
            dataclasses.replace(NUMBER, rules=("rule", "other")),
        ),
        (Annotated[float, "rule"] | None, dataclasses.replace(NUMBER, rules=("rule",))),
    ],
    ids=str,
)
def test_every_spelling_is_read_alike(annotation, kind):
    assert read(annotation) == kind


def test_annotations_stored_as_text_are_read_once_they_are_evaluated():
    fields = typing.get_type_hints(postponed.PostponedOptions, include_extras=True)
    assert read(fields["scale"]) == read(fields["old"]) == NUMBER
    parameters = inspect.signature(postponed.measure, eval_str=True).parameters
    assert read(parameters["table"].annotation) == WORD


@pytest.mark.parametrize(
    ("annotation", "allowed", "refused"),
    [
        (float | None, [1.0, None], [1, True, "1"]),
        (int, [1], [True, 1.0, None]),
        (Literal["a", 1], ["a", 1], ["b", True, 1.0, None]),
        (tuple[int, ...], [(1, 2)], [[1, 2], 1]),
        (Any, [1, None, "a"], []),
    ],
    ids=str,
)
def test_values_are_of_the_type_itself(annotation, allowed, refused):
    assert [value for value in allowed if not read(annotation).allows(value)] == []
    assert [value for value in refused if read(annotation).allows(value)] == []


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (float | None, "a number or None"),
        (int | Literal["a", "b"], "a whole number or one of a, b"),
        (tuple, "tuple"),
        (None, "None"),
    ],
    ids=str,
)
def test_kinds_are_described(annotation, text):
    assert str(read(annotation)) == text
