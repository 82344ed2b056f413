"""`create_position` and `list_positions`: what is refused, and with which advice."""

import re

import jax
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rope_jax.positions import list_positions
from rope_jax.positions.scheme import _ELSEWHERE
from rope_jax_kernels import Neighborhood, Window
from tests.positions import schemes
from tests.positions.schemes import DEFAULTS, GRID

SMALL = {"depth": 2, "prefix": 1, "dtype": schemes.SINGLE}


def scheme(text, **changes):
    return schemes.scheme(text, **SMALL | changes)


def test_the_list_of_the_tests_has_every_scheme():
    assert {text.split("(")[0] for text in DEFAULTS} == set(list_positions())


def test_list_positions_takes_patterns():
    assert list_positions("rope*") == ["rope1d", "rope2d", "rope3d", "rope_mixed"]
    assert list_positions("nothing*") == []
    assert list_positions() == sorted(list_positions())


# Texts made of the parts of schemes come closer to the mark than random characters.
NUMBERS = ["1e400", "9" * 400]
fragments = st.sampled_from(
    [*list_positions(), *"()=,+ .-1²٣é", "k_rope", "base", "True", "half", "nan", *NUMBERS]
)


@settings(max_examples=80, derandomize=True, deadline=None)
@given(st.text(max_size=30) | st.lists(fragments, max_size=14).map("".join))
@example("rope2d(base=" + "9" * 5000 + ")")
@example("rope2d(base=-1e999)")
@example("lape(" * 5000 + "ape")
def test_no_text_raises_anything_but_a_value_error(text):
    try:
        position = nnx.eval_shape(lambda: scheme(text))
    except ValueError:
        return
    graph, params = nnx.split(position)
    jax.eval_shape(lambda params: jax.tree.leaves(nnx.merge(graph, params).terms((2, 3))), params)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (
            "rope2",
            "unknown positional scheme 'rope2'; the nearest are 'rope2d', ",
        ),
        ("quaternions", "unknown positional scheme 'quaternions'; the nearest are"),
        ("ape+rbp", "unknown positional scheme 'rbp'; the nearest are 'rpb'"),
        ("rope_axial", "unknown positional scheme 'rope_axial'; here it is 'rope2d'; rope_jax"),
        (
            "axial_rope(krope=2)",
            "axial_rope has no option 'krope'; did you mean 'k_rope'? known: k_rope, shared,",
        ),
        ("none(k_rope=2)", "none has no option 'k_rope'; known: none"),
        ("rope2d(rngs=1)", "rope2d has no option 'rngs'"),
        ("rope2d(stage=1)", "rope2d has no option 'stage'"),
        ("lape(ape,inner=1)", "lape has no option 'inner'"),
        ("rope2d(base=fast)", "rope2d: base must be a number"),
        ("rope2d(base=nan)", "rope2d: base must be a number"),
        ("rope2d(base=True)", "rope2d: base must be a number"),
        ("rope2d(k_rope=2.5)", "rope2d: k_rope must be a whole number"),
        ("rope2d(k_rope=True)", "rope2d: k_rope must be a whole number"),
        ("rope2d(shared=2)", "rope2d: shared must be True or False"),
        ("rope2d(pairing=1)", "rope2d: pairing must be one of half, interleaved, not 1"),
        ("rope2d(base=0)", "rope2d: base must be a number above 0"),
        ("rope1d(base=-10)", "rope1d: base must be a number above 0"),
        (
            "rope_mixed(base=1e400)",
            "rope_mixed: base must be a number above 0 and at most 1e+30",
        ),
        ("sincos1d(base=0)", "sincos1d: base must be a"),
        ("sincos2d(base=-1)", "sincos2d: base must be a"),
        ("ape(std=-1)", "ape: std must be a number of at least 0"),
        (
            "rope2d(pairing=interleave)",
            "rope2d: pairing must be one of half, interleaved",
        ),
        (
            "rope2d(freq_span=half)",
            "rope2d: freq_span must be one of reduced, full",
        ),
        (
            "axial_rope(generator=pi)",
            "generator must be one of hdit, eq35, table31, exponential",
        ),
        (
            "axial_rope(coords=corners)",
            "coords must be one of centres, endpoints, absolute",
        ),
        (
            "axial_rope(aspect=square)",
            "aspect must be one of isotropic, separate",
        ),
        (
            "axial_rope(coords=absolute,aspect=separate)",
            "aspect=separate is the form of a box, which coords=absolute does not have: leave it",
        ),
        ("rope2d(order=heo)", "order must be one of blocks, alternate"),
        (
            "cat_rope(coords=centres)",
            "coords must be one of endpoints, half_open",
        ),
        (
            "rpb(prefix=True,key_norm=True)",
            "key_norm=True goes with global attention and without prefix=True",
        ),
        ("rpb(std=-1)", "std must be a number of at least 0"),
        ("axial_rope(axis_order=zx)", "axis_order must be one of yx, xy"),
        ("sincos2d(order=swin)", "order must be one of heo, lape, moco, timm"),
        (
            "rpb(grow=crop)",
            "grow must be one of bicubic, antialias, bilinear, pad",
        ),
        (
            "rpb(shrink=pad)",
            "shrink must be one of bicubic, antialias, bilinear, crop",
        ),
        ("rope2d(k_rope=0)", "k_rope=0 does not fit head dimension 16"),
        ("lape", "lape(...) takes one scheme inside, as in lape(ape), but 0 schemes are given"),
        (
            "lape(ape,sincos1d)",
            "lape(...) takes one scheme inside, as in lape(ape), but 2 schemes are given",
        ),
        ("ape(sincos1d)", "ape(...) takes options only, as in name(option=value)"),
        (
            "lape(rope2d)",
            "lape(...) wraps one absolute embedding: ape, sincos1d, sincos2d, gpe or cape",
        ),
        (
            "lape(ape,join=both)",
            "join must be one of lape, shared_norm, share, unshare",
        ),
        (
            "lape(gpe,join=unshare)",
            "join=unshare learns an embedding for each layer: use lape(ape,join=unshare), or join=",
        ),
        (
            "ape(resize=nearest)",
            "ape: resize must be one of bicubic, antialias, dinov2, ",
        ),
        (
            "cape(global_scale=0.5)",
            "global_scale must be a number of at least 1",
        ),
        ("cape(local_shift=-1)", "local_shift must be a number of at least 0"),
        (
            "peg(after=2)",
            "peg: after, a block, must be a whole number of at least 0 and below 2, not 2",
        ),
        ("cpb(hidden=0)", "hidden must be a"),
        ("alibi2d(scale=0)", "scale must be a number above 0"),
        (
            "irpe(alpha=0.5)",
            "alpha=0.5, beta=3.8, gamma=15.2 must satisfy 1 <= alpha <= beta and alpha < gamma",
        ),
        (
            "irpe(gamma=1)",
            "alpha=1.9, beta=3.8, gamma=1.0 must satisfy 1 <= alpha <= beta and alpha < gamma",
        ),
        ("comrope(variant=lp)", "variant must be one of ld, ap"),
        ("comrope(perturbation=-1)", "perturbation must be a"),
        ("string(variant=qr)", "variant must be one of cayley, circulant"),
        ("dinov3(jitter=0.5)", "jitter must be a number of at least 1"),
        ("dinov3(rescale=0.9)", "rescale must be a number of at least 1"),
        ("dinov3(max_period=3)", "min_period=0.0 and max_period=3.0 must satisfy 0 < min_period"),
        (
            "dinov3(min_period=3,max_period=2)",
            "min_period=3.0 and max_period=2.0 must satisfy 0 < min_period",
        ),
        ("dinov3(shift=-1)", "shift must be a number of at least 0"),
        ("lape(ape+sincos1d)", "lape(...) wraps one absolute embedding"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(text, advice):
    with pytest.raises(ValueError, match=re.escape(advice)):
        scheme(text)


@pytest.mark.parametrize(
    ("text", "settings", "advice"),
    [
        (
            "axial_rope(k_rope=16)",
            {"head_dim": 32},
            "use k_rope of 1 or 2 or 4 or 8, or",
        ),
        (
            "rope1d(k_rope=32)",
            {"head_dim": 32},
            "2 * k_rope; use k_rope of 1 or 2 or 4 or 8 or 16, or a model with another width",
        ),
        ("rope2d", {"head_dim": 6}, "4 * k_rope; use a model with another width or number"),
        (
            "liere(block=3)",
            {},
            "use block of 2 or 4 or 8 or 16, or",
        ),
        ("liere", {"head_dim": 6}, "use block of 2 or 3 or 6, or a model with another width"),
        (
            "comrope(variant=ap)",
            {"head_dim": 8},
            "use block of 2",
        ),
        ("string", {"head_dim": 6}, "head dimension 6 must be divisible by 4"),
        ("spherical_rope", {"head_dim": 2}, "head dimension 2 has no group of three channels"),
        *[
            (
                name,
                {"channels": channels},
                f"need a width divisible by {divisor}, but the model is {channels} wide",
            )
            for name, channels, divisor in [
                ("sincos1d", 47, 2),
                ("sincos2d", 46, 4),
                ("gpe", 46, 4),
                ("cape", 47, 2),
            ]
        ],
        *[
            case
            for pattern in (Window((2, 2)), Neighborhood((3, 3)))
            for case in [
                (
                    "irpe",
                    {"pattern": pattern, "prefix": 0},
                    "a bias that depends on the query is no table of offsets, which windows and",
                ),
                (
                    "rpb(key_norm=True)",
                    {"pattern": pattern, "prefix": 0},
                    "key_norm=True goes with global attention",
                ),
            ]
        ],
        (
            "rpb(prefix=True)",
            {"prefix": 0},
            "prefix=True is the bias of class and register tokens, of which this model's attention "
            "has none",
        ),
    ],
)
def test_schemes_refuse_stages_for_which_they_are_not_defined(text, settings, advice):
    with pytest.raises(ValueError, match=re.escape(advice)):
        scheme(text, **settings)


def test_k_rope_16_goes_with_6_heads():
    freqs = scheme("axial_rope(k_rope=16)", head_dim=64).terms(GRID).rotation.freqs
    assert freqs.shape == (3, 2, 2)  # one pair of channels for each axis


def test_names_of_others_are_names_of_none_here():
    assert not _ELSEWHERE.keys() & set(list_positions())
    assert set(_ELSEWHERE.values()) <= set(list_positions())
