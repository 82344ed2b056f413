"""`create_position` and `list_positions`: refusals and their advice."""

import re

import jax
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rope_jax.names.options import find_options
from rope_jax.positions import list_positions
from rope_jax.positions.scheme import _ELSEWHERE, SCHEMES
from rope_jax_kernels import Neighborhood, Window
from tests.positions import schemes
from tests.positions.schemes import DEFAULTS

SMALL = {"depth": 2, "prefix": 1, "dtype": schemes.SINGLE}


def scheme(text, **changes):
    return schemes.scheme(text, **SMALL | changes)


def test_default_texts_cover_every_scheme():
    assert {text.split("(")[0] for text in DEFAULTS} == set(list_positions())


# Texts made of parts of schemes test the parser better than random characters.
NUMBERS = ["1e400", "9" * 400]
fragments = st.sampled_from(
    [*list_positions(), *"()=,+ .-1²٣é", "k_rope", "base", "True", "half", "nan", *NUMBERS]
)


@settings(max_examples=80, derandomize=True, deadline=None)
@given(st.text(max_size=30) | st.lists(fragments, max_size=14).map("".join))
@example("rope2d(base=" + "9" * 5000 + ")")
@example("rope2d(base=-1e999)")
@example("lape(" * 5000 + "ape")
def test_invalid_texts_raise_only_value_errors(text):
    try:
        position = nnx.eval_shape(lambda: scheme(text))
    except ValueError:
        return
    graph, params = nnx.split(position)
    jax.eval_shape(lambda params: jax.tree.leaves(nnx.merge(graph, params).terms((2, 3))), params)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rope2", "'rope2'; the nearest are 'rope2d'"),
        ("ape+rbp", "'rbp'; the nearest are 'rpb'"),
        ("rope_axial", "here it is 'rope2d'"),
        ("axial_rope(krope=2)", "did you mean 'k_rope'"),
        ("none(k_rope=2)", "no option 'k_rope'"),
        ("rope2d(rngs=1)", "no option 'rngs'"),
        ("rope2d(stage=1)", "no option 'stage'"),
        ("lape(ape,inner=1)", "no option 'inner'"),
        ("lape", "lape(ape), but 0 schemes"),
        ("lape(ape,sincos1d)", "lape(ape), but 2 schemes"),
        ("lape(ape+sincos1d)", "one absolute embedding"),
        ("lape(rope2d)", "one absolute embedding"),
        ("ape(sincos1d)", "options only"),
        # A value of each kind of option, and combinations of options.
        ("rope2d(base=0)", "base must be a number above 0"),
        ("rope_mixed(base=1e400)", "at most 1e+30"),
        ("rope2d(k_rope=2.5)", "k_rope must be"),
        ("axial_rope(generator=nyquist,coords=absolute)", "use generator=exponential"),
        ("rpb(grow=crop)", "grow must be one of"),
        ("rpb(shrink=pad)", "shrink must be one of"),
        ("ape(std=-1)", "std must be"),
        ("cape(global_scale=0.5)", "global_scale must be"),
        ("rope2d(k_rope=0)", "k_rope=0"),
        ("peg(after=2)", "after, a block"),
        ("axial_rope(coords=absolute,aspect=separate)", "aspect=separate"),
        ("rpb(prefix=True,key_norm=True)", "key_norm=True"),
        ("rpb(key_norm=True,shrink=geometric)", "grow and shrink are geometric for tables"),
        ("lape(gpe,join=unshare)", "join=unshare"),
        ("irpe(alpha=0.5)", "alpha=0.5"),
        ("irpe(gamma=1)", "gamma=1.0"),
        ("cpb(hidden=0)", "hidden must be"),
        ("alibi2d(scale=0)", "scale must be"),
        ("dinov3(jitter=0.5)", "jitter must be"),
        ("dinov3(rescale=0.9)", "rescale must be"),
        ("sincos1d(base=0)", "base must be"),
        ("sincos2d(base=0)", "base must be"),
        ("dinov3(max_period=3)", "max_period=3.0"),
        ("dinov3(min_period=3,max_period=2)", "min_period=3.0"),
    ],
)
def test_unknown_names_and_values_are_refused_with_advice(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        scheme(text)


@pytest.mark.parametrize("name", list_positions())
def test_every_option_has_allowed_values(name):
    for option in find_options(SCHEMES[name].__init__):
        words = f"{option}(=-1|, a block,)? (must be|does not fit)"
        for value in ("unheard_of", "-1"):
            arguments = [*["ape"] * SCHEMES[name].wraps, f"{option}={value}"]
            with pytest.raises(ValueError, match=words):
                scheme(f"{name}({','.join(arguments)})")


WINDOWS, NEAR = Window((2, 2)), Neighborhood((3, 3))


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        ("axial_rope(k_rope=16)", {"head_dim": 32}, "use k_rope of 1 or 2 or 4 or 8, or"),
        ("rope1d(k_rope=32)", {"head_dim": 32}, "use k_rope of 1 or 2 or 4 or 8 or 16, or"),
        ("rope2d", {"head_dim": 6}, "4 * k_rope; use a model"),
        ("liere(block=3)", {}, "use block of 2 or 4 or 8 or 16, or"),
        ("liere", {"head_dim": 6}, "use block of 2 or 3 or 6, or"),
        ("comrope(variant=ap)", {"head_dim": 8}, "use block of 2"),
        ("string", {"head_dim": 6}, "divisible by 4"),
        ("spherical_rope", {"head_dim": 2}, "three channels"),
        ("sincos1d", {"channels": 47}, "divisible by 2"),
        ("sincos2d", {"channels": 46}, "divisible by 4"),
        ("gpe", {"channels": 46}, "divisible by 4"),
        ("cape", {"channels": 47}, "divisible by 2"),
        ("irpe", {"pattern": WINDOWS, "prefix": 0}, "depends on the query"),
        ("irpe", {"pattern": NEAR, "prefix": 0}, "depends on the query"),
        ("rpb(key_norm=True)", {"pattern": WINDOWS, "prefix": 0}, "global attention"),
        ("rpb(key_norm=True)", {"pattern": NEAR, "prefix": 0}, "global attention"),
        ("rpb(prefix=True)", {"prefix": 0}, "prefix=True"),
        ("decomposed", {"pattern": Window((2, 2), (1, 1)), "prefix": 0}, "shifted windows"),
        ("decomposed", {"pattern": NEAR, "prefix": 0}, "windows or global"),
    ],
)
def test_schemes_refuse_unsuitable_stages(text, settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        scheme(text, **settings)


def test_foreign_names_are_not_registered():
    assert not _ELSEWHERE.keys() & set(list_positions())
    assert set(_ELSEWHERE.values()) <= set(list_positions())
