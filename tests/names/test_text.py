"""Notation, sizes, hints and tables: parsing, and refusals with advice."""

import keyword
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rope_jax.names.notation import Call, assignments, parse
from rope_jax.names.text import format_table, image_pair, markdown_table


def single_call(name, *inner, **options):
    return (Call(name, inner, tuple(options.items())),)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("ape", single_call("ape")),
        ("ape()", single_call("ape")),
        (
            " axial_rope ( k_rope = 4 , shared = True ) ",
            single_call("axial_rope", k_rope=4, shared=True),
        ),
        ("rope2d(base=+50)", single_call("rope2d", base=50)),
        ("a(x=-1.5,y=2e3,z=1E-2,w=3.)", single_call("a", x=-1.5, y=2000.0, z=0.01, w=3.0)),
        ("erase(p=.25,q=-.5)", single_call("erase", p=0.25, q=-0.5)),
        ("a(x=False,y=false,z=nan,w=inf)", single_call("a", x=False, y="false", z="nan", w="inf")),
        ("rope_mixed+ape", single_call("rope_mixed") + single_call("ape")),
        ("lape(sincos2d(order=lape))", single_call("lape", single_call("sincos2d", order="lape"))),
        (
            "f(a+b(x=1), c, y=2)",
            single_call("f", single_call("a") + single_call("b", x=1), single_call("c"), y=2),
        ),
    ],
)
def test_parse(text, tree):
    assert repr(parse(text, "position")) == repr(tree)  # 1 == True == 1.0


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
names = names.filter(lambda word: not keyword.iskeyword(word))
words = names.filter(lambda word: word not in ("True", "False"))
values = (
    st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
    | words
)
# A sum is a list of (name, sums inside, options).
sums = st.recursive(
    st.tuples(names, st.just([]), st.just({})).map(lambda call: [call]),
    lambda inner: st.lists(
        st.tuples(names, st.lists(inner, max_size=2), st.dictionaries(names, values, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    max_leaves=5,
)


def write_text(calls, space):
    """The text of a sum, with spaces from `space` between its parts."""

    def call(name, inner, options):
        parts = [write_text(part, space) for part in inner]
        parts += [f"{option}{space()}={space()}{value}" for option, value in options.items()]
        comma = f"{space()},{space()}"
        return f"{name}{space()}({space()}{comma.join(parts)}{space()})" if parts else name

    return space() + f"{space()}+{space()}".join(call(*parts) for parts in calls) + space()


def make_tree(calls):
    return tuple(
        Call(name, tuple(map(make_tree, inner)), tuple(options.items()))
        for name, inner, options in calls
    )


@settings(max_examples=60, derandomize=True, deadline=None)
@given(sums, st.randoms(use_true_random=False))
def test_parsing_inverts_writing(calls, random):
    read = parse(write_text(calls, lambda: random.choice(["", "", " ", "\n  "])), "position")
    assert repr(read) == repr(make_tree(calls))
    assert repr(parse("+".join(map(str, read)), "position")) == repr(read)


MALFORMED = [
    *("", "  ", "3", "ape+", "+ape", "ape++rpb", "ape+3", "ape rpb", "ape)", "ape=1", "ape;rpb"),
    *("a.b", "a[b=1]", "a()(b)", "a*b", "a # b", "a(b={[]:1})", "a\0"),
    *("lape(" * 1000, "a+" * 10**5 + "a"),
    *(
        f"rope2d({inside}"
        for inside in (
            *("", "base", "base=", "base=)", "base=+)", "base=50", "base=50 60)", "base=50px)"),
            *("base=50,,shared=True)", "3=4)", "50)", "base='50')", "base=a²)", "base=1j)"),
            *("base=[1])", "base=1+2)", "*base)", "**base)", "base=1,base=2)"),
            f"base={'9' * 5000})",
        )
    ),
]


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: repr(text[:30]))
def test_malformed_text_is_refused_with_advice(text):
    with pytest.raises(ValueError, match=r"^position=.* cannot be read.*: write name") as caught:
        parse(text, "position")
    assert repr(text[:200]) in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("a=1", {"a": "1"}),
        ("a=1,b=2,a=3", {"a": "3", "b": "2"}),
        (" a=1 , b=f(x=2,y=3),c=[1,(2,3)]", {"a": "1", "b": "f(x=2,y=3)", "c": "[1,(2,3)]"}),
    ],
)
def test_assignments(text, expected):
    assert assignments(text, "--config.model.options") == expected


@pytest.mark.parametrize("text", ["a", "a=", "=1", "1=2", "a=1,b"])
def test_malformed_assignments_are_refused(text):
    with pytest.raises(ValueError, match=r"--options '.*' is not of the form key=value"):
        assignments(text, "--options")


@pytest.mark.parametrize(
    ("size", "pair"),
    [
        (224, (224, 224)),
        (np.int64(8), (8, 8)),
        ((224, 320), (224, 320)),
        ([224, 320], (224, 320)),
        ("224", (224, 224)),
        ("224x320", (224, 320)),
    ],
)
def test_image_pair(size, pair):
    assert image_pair(size) == pair
    assert all(type(number) is int for number in image_pair(size))


@pytest.mark.parametrize(
    "size",
    [0, -1, True, 2.0, None, (1,), (1, 2, 3), (1, 0), (1, 2.0), "", "x", "1x", "1x2x3", "-1"],
)
def test_other_sizes_are_refused(size):
    with pytest.raises(ValueError, match=re.escape(f"image size {size!r} must be a positive")):
        image_pair(size)


def test_tables():
    header, rows = ("name", "size", "top-1"), [("rpb", "8x8", "0.98"), ("a", "-", "-1.5")]
    assert format_table(header, rows).splitlines() == [
        "name  size  top-1",
        "----  ----  -----",
        "rpb    8x8   0.98",
        "a     -      -1.5",
    ]
    assert markdown_table(header, rows).splitlines() == [
        "| name | size | top-1 |",
        "| --- | --- | --- |",
        "| rpb | 8x8 | 0.98 |",
        "| a | - | -1.5 |",
    ]
    assert markdown_table(header, []).endswith("|\n")
