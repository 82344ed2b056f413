"""The attention kernels for Mosaic GPU in interpret mode, against "xla" in float64.

Interpret mode simulates copies, barriers and shared memory, and the copy engine's behaviour past
the end of an array. It has no matrix instruction with an operand in registers: products are
jax.numpy's there. The layout of shared memory and the instructions themselves are tested on a GPU
(tests/gpu), and that they compile in tests/aot.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from rope_jax_kernels import Global, Neighborhood, Window
from rope_jax_kernels.attention import mosaic_program
from rope_jax_kernels.attention.task import Task
from tests.kernels.test_attention_triton import SMALL, check, operands, outputs
from tests.slow import some_slow

pytestmark = pytest.mark.usefixtures("interpreted")

FORWARD = {
    "several examples for a program": (
        (70,),
        {"batch": 3, "head_dim": 64, "pairs": 16, "heads": 1},
    ),
    "two heads, all channels": ((128,), {"head_dim": 64, "pairs": 32, "batch": 1}),
    "no rotation": ((70,), {"pairs": 0, "head_dim": 64, "heads": 1}),
    "several stages, shared frequencies": (
        (260,),
        {"shared": True, "heads": 1, "head_dim": 64, "pairs": 24, "batch": 1},
    ),
    "several stages, no rotation": ((260,), {"pairs": 0, "heads": 1, "batch": 2}),
    "heads of 128, forward": ((150,), {"head_dim": 128, "pairs": 40, "heads": 1, "batch": 2}),
}

# Also of the backward kernel: from one token to as many as it serves.
GRADIENTS = {
    "few tokens, no rotation": ((20,), {"pairs": 0, "heads": 1}),
    "several examples": ((70,), {"heads": 1, "pairs": 16, "batch": 3}),
    "separate arrays": ((70,), {"pairs": 16, "head_dim": 64, "heads": 1, "packed": False}),
    "one token, several examples": ((1,), {"heads": 1, "head_dim": 64, "pairs": 24, "batch": 3}),
    "a whole block": ((64,), {"heads": 2, "packed": False, "pairs": 16, "shared": True}),
    "two blocks": ((65,), {"heads": 2, "head_dim": 64, "pairs": 32, "batch": 1}),
    "three blocks without rotation": ((150,), {"pairs": 0, "heads": 1, "head_dim": 64, "batch": 2}),
    "ViT": ((197,), {"heads": 1, "head_dim": 64, "pairs": 16, "batch": 2}),
    "all tokens": ((256,), {"heads": 2, "pairs": 8, "batch": 1, "packed": False}),
    "heads of 128": ((128,), {"head_dim": 128, "pairs": 40, "heads": 1, "batch": 2}),
    "float16": ((70,), {"heads": 1, "batch": 1, "dtype": jnp.float16}),
    "too many tokens": ((257,), {"heads": 1, "batch": 1}),
}
# Boxes that the roll carries, that reach past the map, that have an odd number of tokens.
WINDOWS = {
    "shifted windows with a bias": (
        Window((7, 7), (3, 3)),
        (8, 9),
        {"bias": True, "batch": 3, "heads": 1},
    ),
    "windows of one box": (
        Window((3, 5)),
        (4, 5),
        {"head_dim": 64, "pairs": 16, "packed": False, "heads": 2, "batch": 1},
    ),
    "windows of two tiles": (
        Window((9, 9), (4, 0)),
        (11, 9),
        {"bias": True, "pairs": 16, "batch": 2, "heads": 1, "dtype": jnp.float16},
    ),
}
# Boxes of neighbourhoods that reach beyond the map, classes of a dilation, a softmax in parts.
NEIGHBORHOODS = {
    "kernel of 3, one tile": (
        Neighborhood((3, 3)),
        (4, 6),
        {"batch": 3, "heads": 1, "bias": True},
    ),
    "dilation": (
        Neighborhood((3, 2), (1, 2)),
        (5, 6),
        {"packed": False, "heads": 1, "bias": True},
    ),
    "kernel of 7": (Neighborhood((7, 7)), (10, 9), {"shared": True, "heads": 2}),
    "larger than the map, no rotation": (
        Neighborhood((5, 9)),
        (4, 11),
        {"pairs": 0, "heads": 1, "bias": True},
    ),
    "tall": (
        Neighborhood((13, 11)),
        (14, 12),
        {"head_dim": 64, "pairs": 16, "heads": 1, "batch": 1, "bias": True},
    ),
}
CASES = {name: (n, options | {"gradients": False}) for name, (n, options) in FORWARD.items()}
CASES |= GRADIENTS
CASES = {name: (Global(), *case) for name, case in CASES.items()} | WINDOWS | NEIGHBORHOODS


run = functools.partial(outputs, implementation="mosaic")


@pytest.fixture
def busy(monkeypatch):
    """Simulates a busy GPU: programs take several examples, however small the batch."""
    monkeypatch.setattr(mosaic_program, "MULTIPROCESSORS", 1)


def check_case(name):
    pattern, places, options = CASES[name]
    options = {"dtype": jnp.bfloat16, "bias": False} | options
    check(pattern, places, implementation="mosaic", **options)


RACED = ["several examples for a program", "no rotation", "several examples"]
RACED += ["shifted windows with a bias", "kernel of 3, one tile"]
# `test_no_races` computes the others, which must not be compiled before.
ALONE = [name for name in CASES if name not in RACED]


ALWAYS = ["few tokens, no rotation", "windows of two tiles", "dilation"]


@pytest.mark.parametrize("name", some_slow(ALONE, ALWAYS))
def test_outputs_and_gradients(name, busy):
    check_case(name)


@pytest.mark.parametrize("name", some_slow(RACED, RACED[:2]))
def test_no_races(name, busy, monkeypatch):
    """Reads and writes of shared memory are ordered."""
    detecting = functools.partial(plgpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(plgpu, "InterpretGPUParams", detecting)
    check_case(name)
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.slow
def test_data_beyond_the_last_token_affects_no_gradient():
    """Nor do the angles of another item of vmap, which are NaN."""
    qkv, coords, freqs, _, cotangent = operands(
        Global(), (65,), dtype=np.float16, bias=False, heads=1, batch=1
    )
    mapped = jax.vmap(lambda coords: run(qkv, coords, freqs, None, cotangent, pattern=Global()))
    # With two equal items: alone, XLA would add up the gradient of freqs in another order.
    alone = mapped(jnp.stack([coords, coords]))
    beside_nan = mapped(jnp.stack([coords, np.full_like(coords, np.nan)]))
    for name in ("out", "qkv", "freqs"):
        np.testing.assert_array_equal(beside_nan[name][0], alone[name][0])


def test_gradient_of_shared_frequencies_in_bfloat16():
    qkv, coords, freqs, bias, cotangent = operands(
        Global(), (5,), dtype=jnp.bfloat16, bias=False, shared=True, batch=1
    )
    arrays = qkv, coords, freqs.astype(jnp.bfloat16), bias, cotangent
    gradient = run(*arrays, pattern=Global())["freqs"]
    assert (gradient.shape, gradient.dtype) == (freqs.shape, jnp.bfloat16)


@pytest.mark.parametrize("pattern", [Window((3, 3)), Neighborhood((3, 3))])
def test_nan_does_not_reach_other_examples(pattern, busy):
    """Neither by slots without a token, which keep what an earlier example left."""
    qkv, *terms, cotangent = operands(
        pattern, (3, 3), dtype=jnp.bfloat16, bias=True, heads=1, batch=3
    )
    qkv[0, 0, 0] = np.nan
    result = run(qkv, *terms, cotangent, pattern=pattern)
    for name in ("out", "qkv"):
        assert np.isnan(np.float32(result[name][0])).any()
        assert np.isfinite(np.float32(result[name][1:])).all()


# A window of two tiles, and an online softmax of several rows of keys.
@pytest.mark.parametrize("pattern", [Window((9, 9)), Neighborhood((9, 9))])
def test_a_bias_of_minus_infinity_masks(pattern, busy):
    qkv, coords, freqs, bias, _ = operands(
        pattern, (9, 9), dtype=jnp.bfloat16, bias=True, heads=1, batch=1
    )
    shape, bias = bias.shape, np.full(bias.size, -np.inf, np.float32)
    bias[bias.size // 2] = 0  # every token sees itself
    result = run(qkv, coords, freqs, bias.reshape(shape), None, pattern=pattern)
    np.testing.assert_array_equal(result["out"], qkv[..., 2, :, :])


@pytest.mark.parametrize(
    ("kernel", "pattern", "places"),
    [
        *(("triton", *case) for case in SMALL.items()),
        ("mosaic", Window((7, 7)), (4, 6)),
        ("mosaic", Neighborhood((3, 3)), (4, 6)),
    ],
)
def test_a_bias_that_is_the_same_everywhere_changes_nothing(kernel, pattern, places):
    """Also where tiles have slots past the end of the map; the lowest one leaves numbers finite.

    The exponential of the large one is infinite.
    """
    dtype, tolerance = (np.float32, 1e-4) if kernel == "triton" else (jnp.bfloat16, 0.02)
    qkv, coords, freqs, bias, cotangent = operands(pattern, places, dtype=dtype, heads=1, batch=1)
    call = functools.partial(outputs, qkv, coords, freqs, pattern=pattern, implementation=kernel)
    none, large, lowest = (
        call(np.full_like(bias, x), cotangent) for x in (0, 100, jnp.finfo(jnp.float32).min)
    )
    for name in none:
        expected, result = (np.float32(x[name]) for x in (none, large))
        atol = tolerance * np.abs(expected).max()
        np.testing.assert_allclose(result, expected, rtol=0, atol=atol)
        assert np.isfinite(np.float32(lowest[name])).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "places"), [(Global(), (70,)), (Window((5, 7), (2, 3)), (6, 9))]
)
def test_vmap_of_gradients(pattern, places, busy):
    """Over data and rotations; sums of one set of examples do not affect those of another."""
    biased = pattern != Global()
    qkv, coords, freqs, bias, cotangent = operands(
        pattern, places, dtype=jnp.bfloat16, bias=biased, heads=1, batch=3
    )
    data, freqs = np.stack([qkv, 2 * qkv]), np.stack([freqs, freqs / 2])
    turned = lambda qkv, freqs: run(qkv, coords, freqs, bias, cotangent, pattern=pattern)
    by_freqs = jax.vmap(turned, (None, 0))(data[0], freqs)
    by_data = jax.vmap(turned, (0, None))(data, freqs[0])
    by_both = jax.vmap(turned)(data, freqs)
    for i in range(2):
        for mapped, at in ((by_freqs, (0, i)), (by_both, (i, i)), (by_data, (i, 0))):
            want = turned(data[at[0]], freqs[at[1]])
            np.testing.assert_array_equal(mapped["qkv"][i], want["qkv"])
            # Sums are in another order if programs take other numbers of examples.
            np.testing.assert_allclose(mapped["freqs"][i], want["freqs"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sums", [2**10, 2**14, 2**22])
def test_programs_write_sums_of_bounded_size(sums):
    """For many examples; one chunk of programs may need more."""
    task = Task(Global(), (64,), 6, 64, True, 16, "half", 0.1, False)
    for programs in (1, 16, 800):
        items = mosaic_program.divide_examples(task, programs, 1000, 1, sums=sums)["items"]
        chunks = -(-1000 // items)
        assert chunks == 1 or chunks * 6 * programs * sums <= mosaic_program.MOST_SUMS
