"""Splitting and packing the projection as machine code for Hopper, and a layer before cuDNN."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import _rotations, _timing
from benchmarks._program import compile_ahead
from rope_jax_kernels import Rotation
from rope_jax_kernels.rotary import rotate_back_and_pack, unpack_and_rotate
from tests.aot import hlo
from tests.kernels.rotary_cases import CASES, MODEL_CASES, of_layer

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

SHAPES = jax.ShapeDtypeStruct
MODEL_CASES = [
    *MODEL_CASES,
    of_layer("vit_s", 128),
]


def arguments(case):
    """Shapes of qkv, of q, coords and freqs."""
    coords, freqs = case.coords_and_freqs()
    one = (case.batch, case.tokens, case.heads, case.head_dim)
    return (
        SHAPES((*one[:2], 3, *one[2:]), case.dtype),
        SHAPES(one, case.dtype),
        SHAPES(coords.shape, coords.dtype),
        SHAPES(freqs.shape, freqs.dtype),
    )


def unpacked(case, qkv, coords, freqs):
    return unpack_and_rotate(
        qkv, Rotation(coords, freqs, case.pairing), implementation="triton", backward="triton"
    )


def check(program, case):
    """One launch that does not spill; every access as wide as the rows allow."""
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
    program = compile_for((1, 1), lambda *args: unpacked(case, *args), qkv, coords, freqs)
    assert program.operations == ["__gpu$xla.gpu.triton"]
    check(program, case)


@pytest.mark.parametrize("case", [MODEL_CASES[0], *CASES], ids=str)
def test_backward_is_one_launch(case, compile_for):
    """At the shapes of models the test below compiles the same kernel, with sums."""
    qkv, x, coords, freqs = arguments(case)

    def backward(gq, gk, gv, coords, freqs):
        return jax.vjp(lambda y: unpacked(case, y, coords, freqs), jnp.zeros(qkv.shape, qkv.dtype))[
            1
        ]((gq, gk, gv))

    program = compile_for((1, 1), backward, x, x, x, coords, freqs)
    assert program.operations == ["__gpu$xla.gpu.triton"]
    check(program, case)


@pytest.mark.parametrize("case", MODEL_CASES, ids=str)
def test_gradient_of_frequencies_comes_with_the_same_pass(case, compile_for):
    def backward(gq, gk, gv, qkv, coords, freqs):
        return jax.vjp(lambda qkv, freqs: unpacked(case, qkv, coords, freqs), qkv, freqs)[1](
            (gq, gk, gv)
        )

    qkv, x, coords, freqs = arguments(case)
    check(compile_for((1, 1), backward, x, x, x, qkv, coords, freqs), case)


@pytest.mark.parametrize("kind", ["triton", "xla"])
def test_no_collective_when_sharded_over_batch_and_heads(kind, compile_for):
    case = MODEL_CASES[-1]
    qkv, x, coords, freqs = arguments(case)
    apart = P("data", None, "heads")
    specs = (P("data", None, None, "heads"), P(), P("heads"))

    def both(qkv, coords, freqs, *gs):
        f = lambda qkv, *angles: unpack_and_rotate(
            qkv, Rotation(*angles, case.pairing), implementation="triton", backward=kind
        )
        f = jax.shard_map(
            f, mesh=jax.sharding.get_abstract_mesh(), in_specs=specs, out_specs=(apart,) * 3
        )
        out, pull_back = jax.vjp(lambda qkv: f(qkv, coords, freqs), qkv)
        return out, pull_back(gs)

    program = compile_for((4, 2), both, qkv, coords, freqs, x, x, x, specs=(*specs, *[apart] * 3))
    assert program.launches() == (2 if kind == "triton" else 1)
    assert set(program.operations) <= {"__gpu$xla.gpu.triton", "fusion"}


def test_packing_alone(compile_for):
    case = MODEL_CASES[-1]
    _, x, coords, freqs = arguments(case)
    pack = lambda q, k, v, *angles: rotate_back_and_pack(
        q, k, v, Rotation(*angles, case.pairing), implementation="triton"
    )
    program = compile_for((1, 1), pack, x, x, x, coords, freqs)
    assert program.operations == ["__gpu$xla.gpu.triton"]
    check(program, case)


# (form, what is trained) -> launches and units between projection and cuDNN. None of the forms may
# get worse, and their order decides which one a model takes: kernels/README.md.
LIMITS = {
    ("xla", ""): (4, 6.1),
    ("in_place", ""): (2, 10.1),
    ("unpack", ""): (1, 6.1),
    ("xla", "fixed"): (6, 12.1),
    ("unpack", "fixed"): (4, 12.1),
    ("unpack_pack", "fixed"): (4, 15.1),
    ("xla", "learned"): (14, 18.4),
    ("unpack", "learned"): (6, 17.6),
}


@pytest.mark.parametrize(("form", "trained"), LIMITS)
def test_what_stands_between_projection_and_cudnn(form, trained, gpus):
    figures = hlo.count(form, 32, trained, gpus[0])
    launches, units = LIMITS[form, trained]
    assert figures["launches"] <= launches
    assert 0.98 * units <= figures["units"] <= units


@pytest.mark.parametrize("form", ["xla", "triton"])
@pytest.mark.parametrize("copies", [1, 4])
def test_the_benchmark_launches_once_a_step(copies, form, gpus):
    """And copies nothing: neither back to where a loop began, nor around a kernel."""
    problem = _rotations.Problem(16, 3, 14, 64, direction="backward")
    loop = _timing.loop_of(_rotations.step_of(problem, form), 5, in_place=True)
    shapes = jax.eval_shape(lambda: _rotations.operands(problem, form, copies))
    text = compile_ahead(loop, shapes, gpus[0], donate=(0,)).as_text()
    (body,) = re.findall(r"body=%([\w.-]+)", text)
    large = 2 * math.prod(problem.shape)
    kinds = [x.kind for x in hlo.operations(text, body) if max(x.written) >= large]
    kind = "fusion" if form == "xla" else "__gpu$xla.gpu.triton"
    assert kinds == [kind] * _timing.steps_of(copies)
