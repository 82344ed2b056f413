"""Values of options, as annotations allow them in every spelling, on every Python."""

import math
import re
from typing import Annotated, Any, Literal, Optional, Union

import numpy as np
import pytest

from rope_jax.names.notation import parse
from rope_jax.names.options import (
    Count,
    Positive,
    Range,
    Words,
    convert,
    convert_options,
    describe,
    find_options,
)
from tests import postponed

NUMBER, WORD = "a number, or None", "one of 4.4, D.1, or None"


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (float, "a number"),
        (None, "None"),
        (float | None, NUMBER),
        (Optional[float], NUMBER),  # noqa: UP045
        (Union[float, None], NUMBER),  # noqa: UP007
        (int | float | None, "a whole number or a number, or None"),
        (Literal["4.4", "D.1"], "one of 4.4, D.1"),
        (Literal["4.4", "D.1"] | None, WORD),
        (Optional[Literal["4.4", "D.1"]], WORD),  # noqa: UP045
        (Literal["4.4", "D.1", None], WORD),
        (int | Literal["a", "b"], "a whole number or one of a, b"),
        (list[Literal["a"]] | None, "list, or None"),
        (tuple, "tuple"),
        (tuple[int, ...], "a tuple of values, each a whole number"),
        (tuple[Positive, Positive], "2 values, each a number above 0"),
        (Annotated[float, "a rule of others"], "a number"),
        (Count | None, "a whole number of at least 1, or None"),
        (
            Annotated[int, Range(low=2, below=9)],
            "a whole number of at least 2 and below 9",
        ),
        (Annotated[int | tuple[int, int], Words("a size")], "a size"),
    ],
    ids=str,
)
def test_equivalent_annotations_are_described_alike(annotation, text):
    assert describe(annotation) == text


def test_annotations_stored_as_text_are_evaluated():
    fields = find_options(postponed.PostponedOptions)
    assert describe(fields["scale"]) == describe(fields["old"]) == NUMBER
    assert describe(find_options(postponed.measure)["table"]) == WORD


INF = float("inf")


@pytest.mark.parametrize(
    ("annotation", "allowed", "refused"),
    [
        (
            float | None,
            [(1.0, 1.0), (1, 1.0), (None, None), ("None", None)],
            [True, "1", INF, 10**400],
        ),
        (float, [(np.float32(0.5), 0.5)], [math.nan, -INF, None, "None"]),
        (int, [(1, 1), (1.0, 1), (np.int64(3), 3)], [True, 1.5, None, INF, 1e300, math.nan, "1"]),
        (bool, [(True, True), (1, True), (0, False)], [2, 0.0, 0.5, "True", None]),
        (str, [("None", "None")], [1, None]),
        (str | None, [("None", None), ("a", "a")], [1]),
        (int | float, [(2.0, 2.0), (2, 2)], ["2"]),
        (Literal["a", 1], [("a", "a"), (1, 1)], ["b", True, 1.0, None]),
        (Literal["a", None], [("None", None), (None, None)], ["b"]),
        (tuple[int, ...], [((1, 2), (1, 2)), ([1, 2.0], (1, 2)), ((), ())], [1, (1, "a"), (0.5,)]),
        (tuple[float, float], [((1, 2), (1.0, 2.0))], [(1,), (1, 2, 3), "12"]),
        (tuple, [([1, "a"], (1, "a"))], [1]),
        (list[int], [([1], [1])], [(1,)]),
        (Any, [(1, 1), (None, None), ("a", "a")], []),
        (Annotated[float, "a rule of others"], [(1, 1.0)], ["1"]),
        (Annotated[float, Range(low=0, below=1)] | None, [(0, 0.0), (None, None)], [1, -0.1]),
        (Annotated[int, Range(above=0, high=3)], [(3, 3)], [0, 4, INF]),
        (Count | tuple[Count, Count], [(8, 8), ([8, 9], (8, 9))], [0, (8, 0), (8,)]),
    ],
)
def test_values_are_converted_or_refused(annotation, allowed, refused):
    for value, converted in allowed:
        assert repr(convert(value, annotation)) == repr(converted)
    for value in refused:
        message = f"--it must be {describe(annotation)}, not {value!r:.200}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            convert(value, annotation, "--it")


def crop(
    image: int, *, pad: int = 4, scale: float = 1.0, flip: bool = False, fill: str = "edge", rngs=0
):
    pass


def rope_log(stage, *, base=100.0, pairs=4, name=None, rngs):  # whose defaults have the types
    pass


def bind(text):
    """The options of a call of one of these functions."""
    (call,) = parse(text, "position")
    function = {"crop": crop, "rope_log": rope_log}[call.name]
    return convert_options(call.name, dict(call.options), find_options(function))


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        (
            "crop(pad=2,scale=3,flip=True,fill=zero)",
            {"pad": 2, "scale": 3.0, "flip": True, "fill": "zero"},
        ),
        ("rope_log(base=50.0)", {"base": 50.0}),
        ("rope_log(base=50,pairs=2.0)", {"base": 50.0, "pairs": 2}),
        ("rope_log(name=near)", {"name": "near"}),
        ("rope_log(name=None)", {"name": None}),
    ],
)
def test_values_of_options_are_converted(text, bound):
    assert repr(bind(text)) == repr(bound)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crop(pda=2)", "crop has no option 'pda'; did you mean 'pad'? known: pad, scale, flip"),
        ("crop(rngs=2)", "crop has no option 'rngs'; known: pad"),
        ("crop(image=2)", "crop has no option 'image'; known: pad"),
        ("crop(pad=2.5)", "crop: pad must be a whole number"),
        ("crop(pad=True)", "crop: pad must be a whole number"),
        ("crop(scale=fast)", "crop: scale must be a number"),
        ("crop(scale=nan)", "crop: scale must be a number"),
        ("crop(flip=2)", "crop: flip must be True or False"),
        ("crop(fill=1)", "crop: fill must be text"),
        ("rope_log(base=big)", "base must be a number"),
    ],
)
def test_other_options_and_types_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        bind(text)
