"""Splitting and packing the projection as machine code for Hopper, and a layer before cuDNN."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from rope_jax_kernels import Global, Rotation, attention_qkv
from rope_jax_kernels.rotary import unpack_and_rotate
from tests.aot.layers import rotation_shapes
from tests.aot.program import compile_ahead, launches
from tests.kernels.rotary_cases import CASES, MODEL_CASES, layer_case

SHAPES = jax.ShapeDtypeStruct
MODEL_CASES = [
    *MODEL_CASES,
    layer_case("vit_s", 128),
]


def arguments(case):
    """Shapes of qkv, q, coords and freqs."""
    q, *terms = rotation_shapes(dataclasses.replace(case, layout="BLND"))
    return SHAPES((*q.shape[:2], 3, *q.shape[2:]), q.dtype), q, *terms


def call_unpack(case, qkv, coords, freqs):
    return unpack_and_rotate(qkv, Rotation(coords, freqs, case.pairing), implementation="triton")


def check(program, case):
    """Checks for one launch that does not spill and has the widest accesses the rows allow."""
    assert program.launches() == 1
    assert not {"copy", "transpose", "concatenate", "slice"} & set(program.operations)
    (kernel,) = program.kernels
    assert kernel.local_bytes == 0
    assert kernel.registers <= 168  # three programs of 128 threads on a multiprocessor
    row, turning = (
        n * jnp.dtype(case.dtype).itemsize
        for n in (case.head_dim, case.pairs * (1 if case.pairing == "half" else 2))
    )
    if row % 16 == turning % 16 == 0:
        assert kernel.store_widths == {16}
        assert 16 in kernel.load_widths


@pytest.mark.parametrize("case", MODEL_CASES + CASES, ids=str)
def test_forward_is_one_launch(case, compile_for):
    qkv, _, coords, freqs = arguments(case)
    program = compile_for((1, 1), lambda *args: call_unpack(case, *args), qkv, coords, freqs)
    assert program.operations == ["__gpu$xla.gpu.triton"]
    check(program, case)


@pytest.mark.parametrize("case", MODEL_CASES + CASES, ids=str)
def test_the_gradient_of_frequencies_comes_from_the_same_pass(case, compile_for):
    def backward(gq, gk, gv, qkv, coords, freqs):
        f = lambda qkv, freqs: call_unpack(case, qkv, coords, freqs)
        return jax.vjp(f, qkv, freqs)[1]((gq, gk, gv))

    qkv, x, coords, freqs = arguments(case)
    check(compile_for((1, 1), backward, x, x, x, qkv, coords, freqs), case)


# A layer of a ViT-S in front of cuDNN.
B, L, N, D = 128, 196, 6, 64


def layer(x, w, b, wo, freqs, coords):
    """Projection, rotation, cuDNN's attention, projection."""
    qkv = (x @ w + b).reshape(B, L, 3, N, D)
    rotation = Rotation(coords, freqs)
    out = attention_qkv(qkv, pattern=Global(), rotation=rotation, implementation="cudnn")
    return out.reshape(B, L, N * D) @ wo


# Operands with a gradient -> launches between projection and cuDNN, and what they move: units, each
# one of q, k and v, read or written once. They must not grow; kernels/README.md has the forms
# that this one was compared with.
LIMITS = {0: (1, 6.1), 4: (4, 12.1), 5: (6, 18.6)}


@pytest.mark.parametrize("learned", LIMITS)
def test_launches_between_projection_and_cudnn(learned, gpus):
    """Forward, with fixed frequencies and with learned ones."""
    shapes = [(B, L, N * D)] * 2 + [(N * D, 3 * N * D), (3 * N * D,), (N * D, N * D)]
    arguments = [SHAPES(shape, jnp.bfloat16) for shape in shapes]
    arguments += [SHAPES((N, 2, 32), jnp.float32), SHAPES((L, 2), jnp.float32)]

    def training(cotangent, *operands):
        f = lambda *learned_operands: layer(*learned_operands, *operands[learned:])
        out, pull_back = jax.vjp(f, *operands[:learned])
        return out, pull_back(cotangent)

    f = training if learned else lambda _, *operands: layer(*operands)
    text = compile_ahead(f, arguments, gpus[0]).as_text()
    between = [x for x in launches(text) if not x.kind.startswith("__cu")]
    most, units = LIMITS[learned]
    assert len(between) <= most
    moved = sum(x.bytes for x in between) / (2 * B * L * N * D)
    assert 0.98 * units <= moved <= units
