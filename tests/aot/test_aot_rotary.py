"""The rotary kernels as machine code for Hopper: registers, width of accesses, what aliases, and what XLA puts around them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from rope_jax_kernels import Rotation, rotate, rotate_by_angles, rotate_qkv
from rope_jax_kernels.rotary import tiling
from tests.kernels.rotary_cases import CASES, MODEL_CASES, Case

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

SHAPES = jax.ShapeDtypeStruct


def arguments(case):
    """Shapes of q (or k), coords and freqs."""
    coords, freqs = case.coords_and_freqs()
    return SHAPES(case.shape(), case.dtype), SHAPES(coords.shape, coords.dtype), SHAPES(freqs.shape, freqs.dtype)


def turn(case, q, k, coords, freqs):
    return rotate(q, k, Rotation(coords, freqs, case.pairing), layout=case.layout, implementation="triton")


def turn_back(case, gq, gk, coords, freqs):
    """The backward pass alone, without a gradient of the angles."""
    zeros = jnp.zeros(case.shape(), case.dtype)
    return jax.vjp(lambda q, k: turn(case, q, k, coords, freqs), zeros, zeros)[1]((gq, gk))


def widest(case):
    """The widest access that the rows allow, in bytes."""
    itemsize = jnp.dtype(case.dtype).itemsize
    pairs = tiling.vector_pairs(case.pairs, case.head_dim, itemsize, case.pairing)
    return pairs * itemsize * (1 if case.pairing == "half" else 2)


@pytest.mark.parametrize("case", MODEL_CASES + CASES, ids=str)
def test_one_launch_in_place(case, compile_for):
    x, coords, freqs = arguments(case)
    program = compile_for((1, 1), functools.partial(turn, case), x, x, coords, freqs, donate=(0, 1))
    assert program.operations == ["__gpu$xla.gpu.triton"]
    assert program.aliased_bytes == 2 * x.size * x.dtype.itemsize
    (kernel,) = program.kernels
    assert kernel.local_bytes == 0
    assert kernel.registers <= 128  # four programs of 128 threads on a multiprocessor
    assert kernel.store_widths == {widest(case)}
    assert widest(case) in kernel.load_widths


@pytest.mark.parametrize("case", MODEL_CASES + CASES, ids=str)
def test_backward_pass_is_one_launch_in_place(case, compile_for):
    x, coords, freqs = arguments(case)
    program = compile_for((1, 1), functools.partial(turn_back, case), x, x, coords, freqs, donate=(0, 1))
    assert program.operations == ["__gpu$xla.gpu.triton"]
    assert program.aliased_bytes == 2 * x.size * x.dtype.itemsize
    assert (program.kernels[0].local_bytes, program.kernels[0].store_widths) == (0, {widest(case)})


@pytest.mark.parametrize("case", MODEL_CASES + CASES, ids=str)
def test_gradient_of_frequencies_comes_with_the_same_pass(case, compile_for):
    def backward(gq, gk, q, k, coords, freqs):
        return jax.vjp(lambda q, k, freqs: turn(case, q, k, coords, freqs), q, k, freqs)[1]((gq, gk))

    x, coords, freqs = arguments(case)
    program = compile_for((1, 1), backward, x, x, x, x, coords, freqs, donate=(0, 1))
    assert program.launches() == 1
    assert not {"copy", "transpose"} & set(program.operations)
    assert program.aliased_bytes >= 2 * x.size * x.dtype.itemsize
    (kernel,) = program.kernels
    assert kernel.local_bytes == 0
    assert widest(case) in kernel.load_widths & kernel.store_widths


@pytest.mark.parametrize("case", [MODEL_CASES[0], MODEL_CASES[1]], ids=str)
def test_packed_is_read_where_it_lies(case, compile_for):
    _, coords, freqs = arguments(case)
    qkv = SHAPES((case.batch, case.tokens, 3, case.heads, case.head_dim), case.dtype)
    f = lambda qkv, coords, freqs: rotate_qkv(qkv, Rotation(coords, freqs, case.pairing), implementation="triton")
    backward = lambda g, coords, freqs: jax.vjp(lambda x: f(x, coords, freqs), jnp.zeros(g.shape, g.dtype))[1](g)
    for direction in (f, backward):
        program = compile_for((1, 1), direction, qkv, coords, freqs, donate=(0,))
        assert program.operations == ["__gpu$xla.gpu.triton"]
        assert program.aliased_bytes == qkv.size * qkv.dtype.itemsize
        assert (program.kernels[0].local_bytes, program.kernels[0].store_widths) == (0, {widest(case)})


@pytest.mark.parametrize("theta_dtype", ["float32", "bfloat16"])
def test_explicit_angles(theta_dtype, compile_for):
    case = MODEL_CASES[0]
    x, _, _ = arguments(case)
    theta = SHAPES((case.heads, case.tokens, case.pairs), theta_dtype)
    f = lambda x, theta: rotate_by_angles(x, theta, implementation="triton")
    program = compile_for((1, 1), f, x, theta, donate=(0,))
    assert (program.operations, program.aliased_bytes) == (["__gpu$xla.gpu.triton"], x.size * x.dtype.itemsize)
    assert (program.kernels[0].local_bytes, program.kernels[0].store_widths) == (0, {16})
    program = compile_for((1, 1), lambda x, theta, g: jax.vjp(f, x, theta)[1](g), x, theta, x, donate=(2,))
    assert (program.launches(), program.kernels[0].local_bytes) == (1, 0)


@pytest.mark.parametrize(("remat", "learned"), [(False, False), (True, False), (False, True)], ids=["kept", "remat", "learned"])
def test_no_copies_between_projections_and_kernel(remat, learned, compile_for):
    """A layer whose q and k come from two projections, trained: forward, again forward under remat, backward.

    Learned frequencies keep the inputs; with all channels turning (RoPE-Mixed) the forward pass then writes to new arrays.
    """
    case = Case(batch=8, tokens=196, heads=6, head_dim=64, pairs=32 if learned else 16, dtype="bfloat16")
    channels = case.heads * case.head_dim

    def layer(x, wq, wk, freqs, coords):
        q, k = ((x @ w).reshape(*x.shape[:2], case.heads, case.head_dim) for w in (wq, wk))
        q, k = turn(case, q, k, coords, freqs)
        return jnp.sum(jnp.sin(q.astype(jnp.float32) * k.astype(jnp.float32)))

    loss = jax.checkpoint(layer) if remat else layer
    x, w = SHAPES((case.batch, case.tokens, channels), case.dtype), SHAPES((channels, channels), case.dtype)
    _, coords, freqs = arguments(case)
    program = compile_for((1, 1), jax.value_and_grad(loss, argnums=(0, 1, 2, 3) if learned else (0, 1, 2)), x, w, w, freqs, coords)
    assert program.launches() in ((2, 3) if remat else (2,))
    assert not {"copy", "transpose"} & set(program.operations)


def test_vmap_is_still_one_launch_in_place(compile_for):
    case = Case(batch=8, tokens=49, heads=3, head_dim=32, pairs=8, dtype="bfloat16")
    x, coords, freqs = (x if x.ndim == 2 else SHAPES((5, *x.shape), x.dtype) for x in arguments(case))
    program = compile_for((1, 1), jax.vmap(functools.partial(turn, case), (0, 0, None, 0)), x, x, coords, freqs, donate=(0, 1))
    assert program.operations == ["__gpu$xla.gpu.triton"]
    assert program.aliased_bytes == 2 * x.size * x.dtype.itemsize


def test_no_collective_when_sharded_over_batch_and_heads(compile_for):
    case = MODEL_CASES[0]
    x, coords, freqs = arguments(case)
    specs = (P("data", None, "heads"), P("data", None, "heads"), P(), P("heads"))

    def both(q, k, coords, freqs, gq, gk):
        mesh = jax.sharding.get_abstract_mesh()
        f = jax.shard_map(functools.partial(turn, case), mesh=mesh, in_specs=specs, out_specs=specs[:2])
        out, vjp = jax.vjp(lambda q, k: f(q, k, coords, freqs), q, k)
        return out, vjp((gq, gk))

    program = compile_for((4, 2), both, x, x, coords, freqs, x, x, specs=(*specs, *specs[:2]), donate=(0, 1, 4, 5))
    assert program.operations == ["__gpu$xla.gpu.triton"] * 2
    assert program.aliased_bytes == 4 * x.size * x.dtype.itemsize // 8
