"""How schemes are written: what is read, and what is refused with which advice."""

import re

import jax
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rope_jax.positions import Stage, create_position, list_positions
from rope_jax.positions.grammar import Call, Sum, parse
from rope_jax_kernels import Neighborhood, Window


def stage(**changes):
    return Stage(**{"depth": 2, "heads": 3, "head_dim": 16, "channels": 48, "grid": (3, 4), "prefix": 1} | changes)


def one(name, *inner, **options):
    return Sum((Call(name, tuple(inner), tuple(options.items())),))


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("ape", one("ape")),
        ("ape()", one("ape")),
        (" axial_rope ( k_rope = 4 , shared = True ) ", one("axial_rope", k_rope=4, shared=True)),
        ("rope2d(base=+50)", one("rope2d", base=50)),
        ("a(x=-1.5,y=2e3,z=1E-2,w=3.)", one("a", x=-1.5, y=2000.0, z=0.01, w=3.0)),
        ("a(x=False,y=false,z=nan,w=inf)", one("a", x=False, y="false", z="nan", w="inf")),
        ("rope_mixed+ape", Sum((Call("rope_mixed"), Call("ape")))),
        ("lape(sincos2d(order=lape))", one("lape", one("sincos2d", order="lape"))),
        ("f(a+b(x=1), c, y=2)", one("f", Sum((Call("a"), Call("b", (), (("x", 1),)))), one("c"), y=2)),
    ],
)
def test_reads(text, tree):
    assert parse(text) == tree
    options = [(value, type(value)) for call in parse(text).calls for _, value in call.options]
    assert options == [(value, type(value)) for call in tree.calls for _, value in call.options]  # 1 == True == 1.0


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
words = names.filter(lambda word: word not in ("True", "False"))
values = st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | words
# A sum is a list of (name, sums inside, options).
sums = st.recursive(
    st.tuples(names, st.just([]), st.just({})).map(lambda call: [call]),
    lambda inner: st.lists(
        st.tuples(names, st.lists(inner, max_size=2), st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3
    ),
    max_leaves=5,
)


def written(calls, space):
    """The text of a sum, with spaces from `space` between its parts."""

    def call(name, inner, options):
        parts = [written(part, space) for part in inner] + [f"{option}{space()}={space()}{value}" for option, value in options.items()]
        return f"{name}{space()}({space()}{(space() + ',' + space()).join(parts)}{space()})" if parts else name

    return space() + f"{space()}+{space()}".join(call(*parts) for parts in calls) + space()


def tree_of(calls):
    return Sum(tuple(Call(name, tuple(map(tree_of, inner)), tuple(options.items())) for name, inner, options in calls))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(sums, st.randoms(use_true_random=False))
def test_what_is_written_is_what_is_read(calls, random):
    read = parse(written(calls, lambda: random.choice(["", "", " ", "\n  "])))
    assert repr(read) == repr(tree_of(calls))  # 1, 1.0 and True are equal, but they do not look the same


MALFORMED = {
    "": (1, "a scheme's name"),
    "  ": (3, "a scheme's name"),
    "3": (1, "a scheme's name"),
    "(ape)": (1, "a scheme's name"),
    "ape+": (5, "a scheme's name"),
    "+ape": (1, "a scheme's name"),
    "ape++rpb": (5, "a scheme's name"),
    "ape+3": (4, "a scheme's name"),
    "ape rpb": (5, "the end"),
    "ape)": (4, "the end"),
    "ape=1": (4, "the end"),
    "rope2d(": (8, "a scheme's name"),
    "rope2d(base": (12, "',' or ')'"),
    "rope2d(base=": (13, "a value for base"),
    "rope2d(base=)": (13, "a value for base"),
    "rope2d(base=+)": (13, "a value for base"),
    "rope2d(base=50": (15, "',' or ')'"),
    "rope2d(base=50 60)": (16, "',' or ')'"),
    "rope2d(base=50px)": (15, "',' or ')'"),
    "rope2d(base=50,,shared=True)": (16, "a scheme's name"),
    "rope2d(base=50,base=60)": (16, "each option once, but base is there twice"),
    "rope2d(3=4)": (8, "an option's name"),
    "rope2d((=3)": (8, "an option's name"),
    "rope2d(50)": (8, "a scheme's name"),
    "ape;rpb": (4, "a name, a number or one of"),
    "rope2d[base=50]": (7, "a name, a number or one of"),
    "rope2d(base='50')": (13, "a name, a number or one of"),
    "lape(" * 1000: (85, "at most 16 parentheses inside each other"),
}


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: text[:30] or "nothing")
def test_malformed_text_is_refused_with_its_place_and_advice(text):
    place, expected = MALFORMED[text]
    with pytest.raises(ValueError, match=re.escape(f"expected {expected}")) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith(f"position={text!r} cannot be read")
    assert f"(character {place})" in message
    assert message.endswith("write name, name(option=value, ...), a+b or outer(inner)")


# Texts made of what schemes are made of come closer to the mark than random characters.
fragments = st.sampled_from(
    [*list_positions(), *"()=,+ .-1²٣é", "k_rope", "base", "shared", "True", "1e400", "9" * 400, "inf", "nan", "half"]
)


@settings(max_examples=250, derandomize=True, deadline=None)
@given(st.text(max_size=30) | st.lists(fragments, max_size=14).map("".join))
@example("rope2d(base=" + "9" * 5000 + ")")
@example("rope2d(base=-1e999)")
@example("lape(" * 5000 + "ape")
def test_no_text_raises_anything_but_a_value_error(text):
    try:
        position = nnx.eval_shape(lambda: create_position(text, stage(), rngs=nnx.Rngs(0)))
    except ValueError:
        return
    graph, params = nnx.split(position)
    jax.eval_shape(lambda params: jax.tree.leaves(nnx.merge(graph, params).terms((2, 3))), params)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("rope2", "unknown positional scheme 'rope2'; did you mean 'rope2d'? known: alibi2d, ape, as2drope,"),
        ("quaternions", "unknown positional scheme 'quaternions'; known: alibi2d, ape, as2drope,"),
        ("ape+rbp", "unknown positional scheme 'rbp'; did you mean 'rpb'?"),
        ("axial_rope(krope=2)", "axial_rope has no option 'krope'; did you mean 'k_rope'? known: pairing, k_rope, shared,"),
        ("none(k_rope=2)", "none has no option 'k_rope'; known: none"),
        ("rope2d(rngs=1)", "rope2d has no option 'rngs'"),
        ("rope2d(stage=1)", "rope2d has no option 'stage'"),
        ("lape(ape,inner=1)", "lape has no option 'inner'"),
        ("rope2d(base=fast)", "rope2d(base=fast): base must be a number"),
        ("rope2d(base=nan)", "rope2d(base=nan): base must be a number"),
        ("rope2d(base=True)", "rope2d(base=True): base must be a number"),
        ("rope2d(k_rope=2.0)", "rope2d(k_rope=2.0): k_rope must be a whole number"),
        ("rope2d(k_rope=True)", "rope2d(k_rope=True): k_rope must be a whole number"),
        ("rope2d(shared=1)", "rope2d(shared=1): shared must be True or False"),
        ("rope2d(pairing=1)", "rope2d(pairing=1): pairing must be a word"),
        ("rope2d(base=0)", "position rope2d: base=0.0 is not allowed; use a number above 0"),
        ("rope1d(base=-10)", "position rope1d: base=-10.0 is not allowed; use a number above 0"),
        ("rope_mixed(base=1e400)", "position rope_mixed: base=inf is not allowed; use a number above 0 and at most 1e+30"),
        ("sincos1d(base=0)", "position sincos1d: base=0.0 is not allowed"),
        ("sincos2d(base=-1)", "position sincos2d: base=-1.0 is not allowed"),
        ("ape(std=-1)", "position ape: std=-1.0 is not allowed; use a number of at least 0"),
        ("rope2d(pairing=interleave)", "position rope2d: pairing=interleave is not allowed; use one of half, interleaved"),
        ("rope2d(freq_span=half)", "position rope2d: freq_span=half is not allowed; use one of reduced, full"),
        ("axial_rope(generator=pi)", "generator=pi is not allowed; use one of hdit, eq35, table31, exponential"),
        ("axial_rope(coords=corners)", "coords=corners is not allowed; use one of centres, endpoints, absolute"),
        ("axial_rope(aspect=square)", "aspect=square is not allowed; use one of isotropic, separate"),
        (
            "axial_rope(coords=absolute,aspect=separate)",
            "aspect=separate is the form of a box, which coords=absolute does not have: leave it",
        ),
        ("rope2d(order=heo)", "order=heo is not allowed; use one of blocks, alternate"),
        ("cat_rope(coords=centres)", "coords=centres is not allowed; use one of endpoints, half_open"),
        ("rpb(prefix=True,key_norm=True)", "key_norm=True goes with global attention and without prefix=True"),
        ("rpb(std=-1)", "std=-1.0 is not allowed; use a number of at least 0"),
        ("axial_rope(axis_order=zx)", "axis_order=zx is not allowed; use one of yx, xy"),
        ("sincos2d(order=swin)", "order=swin is not allowed; use one of heo, lape, moco, timm"),
        ("rpb(grow=crop)", "grow=crop is not allowed; use one of bicubic, antialias, bilinear, pad"),
        ("rpb(shrink=pad)", "shrink=pad is not allowed; use one of bicubic, antialias, bilinear, crop"),
        ("rope2d(k_rope=0)", "k_rope=0 does not go with head dimension 16"),
        ("lape", "lape(...) takes one scheme inside, as in lape(ape), but 0 schemes are given"),
        ("lape(ape,sincos1d)", "lape(...) takes one scheme inside, as in lape(ape), but 2 schemes are given"),
        ("ape(sincos1d)", "ape(...) takes options only, as in name(option=value)"),
        ("lape(rope2d)", "lape(...) wraps one absolute embedding: ape, sincos1d, sincos2d, gpe or cape"),
        ("lape(ape,join=both)", "join=both is not allowed; use one of lape, shared_norm, share, unshare"),
        ("lape(gpe,join=unshare)", "join=unshare learns an embedding for each layer: use lape(ape,join=unshare), or join=share"),
        ("ape(resize=nearest)", "position ape: resize=nearest is not allowed; use one of bicubic, antialias, dinov2, bilinear, pad"),
        ("cape(global_scale=0.5)", "global_scale=0.5 is not allowed; it is the largest factor: use 1 (off) or more"),
        ("cape(local_shift=-1)", "local_shift=-1.0 is not allowed; use a number of at least 0"),
        ("peg(after=2)", "position peg: after=2 is not allowed; use the number of a block, 0 to 1"),
        ("cpb(hidden=0)", "hidden=0 is not allowed; use a width of at least 1"),
        ("alibi2d(scale=0)", "scale=0.0 is not allowed; use a number above 0"),
        ("irpe(alpha=0.5)", "alpha=0.5, beta=3.8, gamma=15.2 must satisfy 1 <= alpha <= beta and alpha < gamma"),
        ("irpe(gamma=1)", "alpha=1.9, beta=3.8, gamma=1.0 must satisfy 1 <= alpha <= beta and alpha < gamma"),
        ("lape(ape+sincos1d)", "lape(...) wraps one absolute embedding"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(text, advice):
    with pytest.raises(ValueError, match=re.escape(advice)):
        create_position(text, stage(), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("text", "head_dim", "advice"),
    [
        ("axial_rope(k_rope=16)", 32, "4 * k_rope; use k_rope of 1 or 2 or 4 or 8, or a model with another width or number of heads"),
        ("rope1d(k_rope=32)", 32, "2 * k_rope; use k_rope of 1 or 2 or 4 or 8 or 16, or a model with another width"),
        ("rope2d", 6, "4 * k_rope; use a model with another width or number of heads"),
    ],
)
def test_heads_that_cannot_be_turned_are_refused_with_what_can(text, head_dim, advice):
    with pytest.raises(ValueError, match=rf"k_rope=\d+ does not go with head dimension {head_dim}: .*{re.escape(advice)}"):
        create_position(text, stage(head_dim=head_dim, channels=3 * head_dim), rngs=nnx.Rngs(0))


def test_k_rope_16_goes_with_6_heads():
    position = create_position("axial_rope(k_rope=16)", stage(head_dim=64, channels=192), rngs=nnx.Rngs(0))
    assert position.terms((3, 4)).rotation.freqs.shape == (3, 2, 2)  # one pair of channels for each axis


@pytest.mark.parametrize(("text", "channels", "divisor"), [("sincos1d", 47, 2), ("sincos2d", 46, 4), ("gpe", 46, 4), ("cape", 47, 2)])
def test_widths_without_sines_and_cosines_are_refused(text, channels, divisor):
    with pytest.raises(ValueError, match=f"need a width divisible by {divisor}, but the model is {channels} wide"):
        create_position(text, stage(channels=channels), rngs=nnx.Rngs(0))


def test_schemes_refuse_attention_for_which_they_are_not_defined():
    for pattern in (Window((2, 2)), Neighborhood((3, 3))):
        with pytest.raises(ValueError, match="a bias that depends on the query is no table of offsets, which windows and"):
            create_position("irpe", stage(pattern=pattern, prefix=0), rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="key_norm=True goes with global attention"):
            create_position("rpb(key_norm=True)", stage(pattern=pattern, prefix=0), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="prefix=True is the bias of class and register tokens, of which this model's attention has none"):
        create_position("rpb(prefix=True)", stage(prefix=0), rngs=nnx.Rngs(0))


def test_list_positions_takes_patterns():
    assert list_positions("rope*") == ["rope1d", "rope2d", "rope3d", "rope_mixed"]
    assert list_positions("nothing*") == []
    assert list_positions() == sorted(list_positions())
