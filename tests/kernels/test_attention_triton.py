"""The attention kernels in interpret mode, against "xla" in float64 and its error in their dtype.

`rope_jax_kernels.accuracy` has the rule.
"""

import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from rope_jax_kernels import (
    Global,
    Neighborhood,
    Rotation,
    Window,
    attention,
    attention_qkv,
    device,
)
from rope_jax_kernels.accuracy import allowed_error, error
from rope_jax_kernels.arithmetic import cos_sin
from rope_jax_kernels.attention import plans, triton
from rope_jax_kernels.attention.task import make_task
from rope_jax_kernels.tuning.tiles import attention_tiles
from tests.slow import some_slow

pytestmark = pytest.mark.usefixtures("interpreted")


def operands(
    pattern,
    places,
    *,
    heads=2,
    head_dim=32,
    pairs=8,
    shared=False,
    bias=True,
    batch=2,
    dtype=np.float64,
):
    """(qkv, coords, freqs, bias, cotangent) of a call; freqs and bias may be None."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape)
    tokens, table = pattern.rotated_tokens(places), pattern.bias_shape(heads, places)
    freqs = draw(1 if shared else heads, 2, pairs) if pairs else None
    arrays = (
        draw(batch, *places, 3, heads, head_dim),
        draw(tokens, 2),
        freqs,
        draw(*table) if bias else None,
    )
    rounded = [
        None if x is None else x.astype(t)
        for x, t in zip(arrays, (dtype, *[np.float32] * 3), strict=True)
    ]
    return *rounded, draw(batch, *places, heads, head_dim).astype(dtype)


# Gradients sum terms that cancel, each of which is rounded in float32: parts of the largest
# element, or of 1. Where a key is attended alone, the gradient of its bias is 0, and nothing but
# these roundings is left.
CANCELLED, ALL_CANCELLED = 4e-7, 4e-6
STATIC = ("pattern", "pairing", "implementation", "packed", "scale")


@functools.partial(jax.jit, static_argnames=STATIC)
def outputs(qkv, coords, freqs, bias, cotangent, *, packed=True, pairing="half", **options):
    """The output and, with a cotangent, the gradients of qkv, freqs and bias."""

    def run(qkv, freqs, bias):
        rotation = None if freqs is None else Rotation(coords, freqs, pairing)
        terms = {"rotation": rotation, "bias": bias} | options
        if packed:
            return attention_qkv(qkv, **terms)
        return attention(*(qkv[..., i, :, :] for i in range(3)), **terms)

    if cotangent is None:
        return {"out": run(qkv, freqs, bias)}
    out, pull_back = jax.vjp(run, qkv, freqs, bias)
    return {"out": out} | dict(zip(("qkv", "freqs", "bias"), pull_back(cotangent), strict=True))


def check(
    pattern,
    places,
    *,
    dtype=jnp.float32,
    packed=True,
    implementation="triton",
    gradients=True,
    pairing="half",
    scale=None,
    **shape,
):
    arrays = operands(pattern, places, dtype=dtype, **shape)
    if not gradients:
        arrays = *arrays[:-1], None
    run = functools.partial(outputs, pattern=pattern, pairing=pairing, scale=scale, packed=packed)
    with jax.enable_x64(True):
        wide = [None if x is None else np.asarray(x, np.float64) for x in arrays]
        exact = run(*wide, implementation="xla")
    plain, kernel = (run(*arrays, implementation=name) for name in ("xla", implementation))
    for name, want in exact.items():
        if want is None:
            continue
        assert kernel[name].dtype == plain[name].dtype
        allowed = allowed_error(error(plain[name], want), dtype, gradient=name != "out")
        if name != "out":
            cancels = name == "bias" and not want.any()
            allowed += ALL_CANCELLED if cancels else CANCELLED
        assert error(kernel[name], want) <= allowed, name


CASES = {
    "one token": (Global(), (1,), {}),
    "windows of one token": (Window((1, 1)), (1, 8), {"head_dim": 16, "batch": 1}),
    "large logits": (
        Global(),
        (110,),
        {"heads": 1, "head_dim": 16, "pairs": 0, "packed": False, "batch": 1},
    ),
    "a prime": (Global(), (53,), {"pairing": "interleaved", "packed": False}),
    "several tiles, shared frequencies": (
        Global(),
        (150,),
        {"heads": 1, "shared": True, "head_dim": 48, "pairs": 12, "batch": 1},
    ),
    "no rotation": (Global(), (70,), {"pairs": 0, "head_dim": 16}),
    "one pair": (Global(), (70,), {"pairs": 1, "bias": False}),
    "window": (Window((7, 7), (3, 3)), (14, 14), {}),
    "window pads": (Window((5, 3), (2, 1)), (8, 7), {"packed": False, "pairing": "interleaved"}),
    "window of several tiles": (Window((9, 10), (4, 0)), (13, 18), {"heads": 1}),
    "neighborhood": (Neighborhood((7, 7)), (10, 17), {"heads": 1}),
    "neighborhood of an even size": (Neighborhood((8, 8)), (12, 12), {"heads": 1, "head_dim": 16}),
    "neighborhood dilated": (Neighborhood((3, 5), (2, 3)), (9, 20), {"heads": 1, "packed": False}),
    "neighborhood above the map": (Neighborhood((13, 3)), (5, 9), {"shared": True}),
}


CASES |= {
    f"{name}, {dtype}": (*CASES[name][:2], CASES[name][2] | {"dtype": dtype})
    for name in ("a prime", "window", "neighborhood")
    for dtype in ("bfloat16", "float16")
}
FAST = ["window", "neighborhood dilated", "a prime, bfloat16"]


@pytest.mark.parametrize("name", some_slow(CASES, FAST))
def test_outputs_and_gradients(name):
    pattern, places, options = CASES[name]
    check(pattern, places, **options)


def check_any_shape(draw):
    """Checks a random call; draw(low, high) returns an integer."""
    pair = lambda low, high: (draw(low, high), draw(low, high))
    size, grid, head_dim = pair(1, 7), pair(1, 12), (16, 20, 32)[draw(0, 2)]
    shift = tuple(draw(0, n - 1) for n in size)
    pattern = (Neighborhood(size, pair(1, 4)), Window(size, shift), Global())[draw(0, 2)]
    check(
        pattern,
        (grid[0] * grid[1],) if isinstance(pattern, Global) else grid,
        heads=draw(1, 2),
        head_dim=head_dim,
        pairs=draw(0, head_dim // 2),
        shared=draw(0, 1) == 1,
        bias=draw(0, 1) == 1,
        pairing=("half", "interleaved")[draw(0, 1)],
        packed=draw(0, 1) == 1,
        batch=1,
    )


# Each compiles four or five kernels, which takes seconds. test_tiles draws many more patterns.
@pytest.mark.slow
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_many_shapes(data):
    check_any_shape(lambda low, high: data.draw(st.integers(low, high)))


SMALL = {Window((3, 3), (1, 1)): (4, 5), Neighborhood((3, 3)): (10, 9), Global(): (17,)}


@pytest.mark.slow
@pytest.mark.parametrize("pattern", SMALL, ids=str)
def test_queries_whose_bias_excludes_all_keys(pattern):
    """Their output and gradients are 0; those of other queries do not change."""
    qkv, coords, freqs, bias, cotangent = operands(
        pattern, SMALL[pattern], dtype=np.float32, batch=1
    )
    bias[0] = np.finfo(np.float32).min
    result, want = (
        outputs(qkv, coords, freqs, bias, cotangent, pattern=pattern, implementation=name)
        for name in ("triton", "xla")
    )
    axes = {"out": (-2, 1e-4), "qkv": (-2, 1e-4), "freqs": (0, 1e-3), "bias": (0, 1e-3)}
    for name, (axis, tolerance) in axes.items():
        first_head, second_head = jnp.unstack(result[name], axis=axis)
        assert not first_head.any()
        expected = jnp.unstack(want[name], axis=axis)[1]
        np.testing.assert_allclose(second_head, expected, atol=tolerance)


@pytest.mark.parametrize(
    ("shift", "sums", "options"),
    [
        ((1, 1), triton.SUMS, {"dtype": jnp.bfloat16}),
        pytest.param((1, 1), 0, {"dtype": jnp.bfloat16}, marks=pytest.mark.slow),
        pytest.param(
            (0, 0),
            triton.SUMS,
            {"dtype": jnp.bfloat16, "bias": False, "packed": False},
            marks=pytest.mark.slow,
        ),
        pytest.param((2, 0), triton.SUMS, {"packed": False, "pairs": 0}, marks=pytest.mark.slow),
    ],
)
def test_programs_of_several_examples(shift, sums, options, monkeypatch):
    """Examples in groups of five and four, as in calls with many programs.

    Without `sums`, the bias has a separate kernel, with a group that has nothing to add.
    """
    monkeypatch.setattr(plans, "PROGRAMS", 7)
    monkeypatch.setattr(triton, "SUMS", sums)
    options = {"batch": 9, "heads": 1} | options
    terms = {"pattern": Window((3, 3), shift), "rotation": None, "bias": None, "scale": None}
    task = make_task((jnp.zeros((9, 4, 5, 3, 1, 32)),), **terms)
    assert plans.plan(task, 2, "forward", 9).each == 5  # and four
    check(Window((3, 3), shift), (4, 5), **options)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("pattern", SMALL, ids=str)
def test_vmap_over_biases_with_non_positive_scales(pattern, scale):
    """By vmap over the bias, as for several seeds."""
    qkv, coords, freqs, bias, cotangent = operands(pattern, SMALL[pattern], dtype=np.float32)
    run = functools.partial(outputs, pattern=pattern, scale=scale)
    plain, kernel = (
        jax.vmap(lambda bias, by=name: run(qkv, coords, freqs, bias, cotangent, implementation=by))(
            np.stack([bias, 2 * bias])
        )
        for name in ("xla", "triton")
    )
    for name, want in plain.items():
        largest = max(np.abs(want).max(), 1)
        np.testing.assert_allclose(kernel[name], want, rtol=0, atol=1e-5 * largest)


def test_vmap_and_remat():
    pattern = Window((4, 4), (2, 2))
    single, *_ = operands(pattern, (6, 8), dtype=np.float32, head_dim=16)
    qkv = np.stack([single, 2 * single])
    attend = functools.partial(attention_qkv, pattern=pattern, implementation="triton")
    mapped = jax.jit(jax.vmap(attend))(qkv)
    for out, x in zip(mapped, qkv, strict=True):
        np.testing.assert_allclose(out, jax.jit(attend)(x), rtol=0, atol=1e-6)
    loss = lambda f: jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))
    np.testing.assert_array_equal(loss(jax.checkpoint(attend))(qkv[0]), loss(attend)(qkv[0]))


@pytest.mark.slow
def test_vmap_over_rotations():
    """All rotations share one qkv; two kernels in turn write its packed gradients."""
    qkv, coords, freqs, *_ = operands(
        Global(), (70,), dtype=np.float32, head_dim=16, batch=1, heads=1
    )
    loss = lambda qkv, freqs: sum(
        jnp.sum(x**2)
        for x in outputs(
            qkv, coords, freqs, None, None, pattern=Global(), implementation="triton"
        ).values()
    )
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    freqs = np.stack([freqs, freqs / 2])
    mapped = jax.jit(jax.vmap(gradients, (None, 0)))(qkv, freqs)
    for i in range(2):
        for got, want in zip(mapped, gradients(qkv, freqs[i]), strict=True):
            np.testing.assert_allclose(got[i], want, rtol=0, atol=1e-6 * np.abs(want).max())


PARTS = ("queries", "keys", "bias")  # of the backward pass


@pytest.mark.parametrize("places", [(33,), (64,), (4, 8), (7, 7)])
@pytest.mark.parametrize("capability", [80, 90])
def test_closed_gradients_of_several_blocks_use_one_stage(places, capability, monkeypatch):
    """With more there is a race (see `plan`), whatever was measured or stored."""
    monkeypatch.setattr(device, "capability", lambda: capability)
    pattern, blocks = Global() if len(places) == 1 else Window((7, 7)), set()
    for dtype, head_dim, biased in itertools.product(
        (jnp.bfloat16, jnp.float32), (32, 64, 128), (False, True)
    ):
        qkv = jax.ShapeDtypeStruct((2048, *places, 3, 1, head_dim), dtype)
        bias = jnp.zeros(pattern.bias_shape(1, places)) if biased else None
        terms = {"pattern": pattern, "rotation": None, "bias": bias, "scale": None}
        sizes = itertools.product((16, 32, 64), (2, 3))
        tiles = [dict.fromkeys(PARTS, (64, columns, 4, stages, 8)) for columns, stages in sizes]
        for tile in [*map(dict, attention_tiles(True, {"qkv": qkv} | terms)), *tiles]:
            task = make_task((qkv,), tile=tuple(tile.items()), **terms)
            launches = [plans.plan(task, qkv.dtype.itemsize, part, 2048) for part in PARTS]
            blocks |= {(x.closed and x.tiles.blocks > 1, x.stages > 1) for x in launches}
    assert (True, False) in blocks
    assert (True, True) not in blocks


@pytest.mark.slow
@pytest.mark.parametrize("pattern", some_slow([Global(), Neighborhood((3, 3))], [Global()]))
def test_small_gradients_in_float16(pattern):
    """The products of these gradients with a scale below one would be subnormal."""
    places = (100,) if isinstance(pattern, Global) else (10, 10)
    qkv, coords, freqs, bias, cotangent = operands(
        pattern, places, dtype=np.float16, head_dim=64, bias=False, batch=1, heads=1
    )

    def gradient(name, dtype):
        arrays = qkv.astype(dtype), coords, freqs, bias, (1e-3 * cotangent).astype(dtype)
        return outputs(*arrays, pattern=pattern, pairing="half", implementation=name)["qkv"]

    exact = np.asarray(gradient("xla", np.float32))
    error = lambda got: np.linalg.norm(np.asarray(got, np.float32) - exact)
    assert error(gradient("triton", np.float16)) <= 2 * error(gradient("xla", np.float16))


@pytest.mark.parametrize("kernel", ["triton", "mosaic"])
def test_unsupported_derivatives_are_refused(kernel):
    """Second derivatives, and those of coordinates."""
    qkv, coords, freqs, *_ = operands(Global(), (5,), dtype=jnp.bfloat16, bias=False)

    def loss(qkv, coords):
        options = {"rotation": Rotation(coords, jnp.asarray(freqs)), "implementation": kernel}
        return (attention_qkv(qkv, pattern=Global(), **options).astype(jnp.float32) ** 2).sum()

    arguments = jnp.asarray(qkv), jnp.asarray(coords)
    with pytest.raises(ValueError, match=f"'{kernel}' .*first derivatives only; use .*'xla'"):
        jax.grad(lambda qkv, coords: jax.grad(loss)(qkv, coords).sum())(*arguments)
    with pytest.raises(ValueError, match=rf"'{kernel}' .*no gradient of rotation\.coords"):
        jax.grad(loss, argnums=1)(*arguments)


def test_sine_and_cosine():
    theta = np.float32([np.linspace(-top, top, 100_001) for top in (1, 100, 1e4)])
    for x, exact in zip(jax.jit(cos_sin)(theta), (np.cos, np.sin), strict=True):
        np.testing.assert_allclose(np.float64(x), exact(np.float64(theta)), rtol=0, atol=2e-7)
