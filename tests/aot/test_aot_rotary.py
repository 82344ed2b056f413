"""The rotary kernels as machine code for Hopper: registers, accesses, aliases, operations."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from rope_jax_kernels import Rotation, rotate, rotate_by_angles, rotate_qkv
from rope_jax_kernels.rotary import tile_sizes
from tests.aot.layers import rotation_shapes
from tests.aot.program import TARGETS, budget
from tests.kernels.rotary_cases import CASES, MODEL_CASES, Case, serves

SHAPES = jax.ShapeDtypeStruct
KERNELS = pytest.mark.parametrize("implementation", TARGETS)
SERVED = pytest.mark.parametrize(
    ("implementation", "case"),
    [(name, case) for name in TARGETS for case in MODEL_CASES + CASES if serves(name, case)],
    ids=str,
)


def turn(case, implementation, q, k, coords, freqs):
    options = {"layout": case.layout, "implementation": implementation}
    return rotate(q, k, Rotation(coords, freqs, case.pairing), **options)


def check_in_place(program, implementation, case, arrays, **options):
    """Checks for a single launch, which overwrites these arrays."""
    assert program.operations == [TARGETS[implementation]]
    assert program.aliased_bytes == sum(x.size * x.dtype.itemsize for x in arrays)
    check_machine_code(program, implementation, case, len(arrays), **options)


def check_machine_code(program, implementation, case, copies, sums=0, registers=128):
    """Checks for one kernel that spills nothing and accesses memory as wide as the rows allow.

    It moves `copies` tiles in and out, and `sums` tiles of sums out. With 128 registers four
    programs of 128 threads fit on a multiprocessor.
    """
    (kernel,) = program.kernels
    assert kernel.local_bytes <= budget(0, elsewhere=256)
    itemsize = jnp.dtype(case.dtype).itemsize
    pairs = tile_sizes.vector_pairs(case.pairs, case.head_dim, itemsize, case.pairing)
    if implementation == "triton":
        rows = case.tokens * case.heads
        sizes = case.batch, rows, case.pairs, case.head_dim, itemsize, case.pairing
        tile = tile_sizes.plan_spread_tile(*sizes)
        pairs = min(pairs, max(1, tile.rows * tile.pairs // tile_sizes.THREADS))
    widest = pairs * itemsize * (1 if case.pairing == "half" else 2)
    if implementation == "triton":
        assert widest in kernel.load_widths & kernel.store_widths
        assert sums or kernel.store_widths == {widest}
        assert sums or kernel.registers <= budget(registers)
    else:
        assert kernel.registers <= budget(registers)
        assert kernel.store_widths == set()
        assert (
            widest in kernel.shared_widths
            or case.tokens < tile_sizes.THREADS
            or case.pairs * itemsize % 32
        )
        # Runs of bytes would not end where the tokens do; only the sums have room for that.
        assert kernel.runs_out <= sums
        assert kernel.tensors_out + kernel.runs_out in (copies + sums, 2 * copies + sums)


@SERVED
def test_one_launch_in_place(implementation, case, compile_for):
    x, coords, freqs = rotation_shapes(case)
    f = functools.partial(turn, case, implementation)
    program = compile_for((1, 1), f, x, x, coords, freqs, donate=(0, 1))
    check_in_place(program, implementation, case, [x, x])


@SERVED
def test_the_gradient_of_frequencies_comes_from_the_same_pass(implementation, case, compile_for):
    def backward(gq, gk, q, k, coords, freqs):
        f = lambda q, k, freqs: turn(case, implementation, q, k, coords, freqs)
        return jax.vjp(f, q, k, freqs)[1]((gq, gk))

    x, coords, freqs = rotation_shapes(case)
    program = compile_for((1, 1), backward, x, x, x, x, coords, freqs, donate=(0, 1))
    assert program.launches() == 1
    assert not {"copy", "transpose"} & set(program.operations)
    assert program.aliased_bytes >= 2 * x.size * x.dtype.itemsize
    check_machine_code(program, implementation, case, copies=2, sums=1)


@pytest.mark.parametrize(
    ("implementation", "case"),
    [
        ("triton", MODEL_CASES[0]),
        ("triton", MODEL_CASES[1]),
        ("mosaic", MODEL_CASES[0]),
        ("mosaic", MODEL_CASES[-1]),
    ],
    ids=str,
)
def test_packed_is_rotated_in_place(implementation, case, compile_for):
    _, coords, freqs = rotation_shapes(case)
    qkv = SHAPES((case.batch, case.tokens, 3, case.heads, case.head_dim), case.dtype)
    f = lambda qkv, coords, freqs: rotate_qkv(
        qkv, Rotation(coords, freqs, case.pairing), implementation=implementation
    )
    backward = lambda g, coords, freqs: jax.vjp(
        lambda x: f(x, coords, freqs), jnp.zeros(g.shape, g.dtype)
    )[1](g)
    for direction in (f, backward):
        program = compile_for((1, 1), direction, qkv, coords, freqs, donate=(0,))
        assert program.operations == [TARGETS[implementation]]
        assert program.aliased_bytes == qkv.size * qkv.dtype.itemsize
        check_machine_code(program, implementation, case, copies=2)


@KERNELS
@pytest.mark.parametrize("theta_dtype", ["float32", "bfloat16"])
def test_explicit_angles(theta_dtype, implementation, compile_for):
    case = MODEL_CASES[0]
    x, *_ = rotation_shapes(case)
    theta = SHAPES((case.heads, case.tokens, case.pairs), theta_dtype)
    f = lambda x, theta: rotate_by_angles(x, theta, implementation=implementation)
    program = compile_for((1, 1), f, x, theta, donate=(0,))
    check_in_place(program, implementation, case, [x])
    program = compile_for(
        (1, 1), lambda x, theta, g: jax.vjp(f, x, theta)[1](g), x, theta, x, donate=(2,)
    )
    assert program.launches() == 1
    check_machine_code(program, implementation, case, copies=1, sums=1)


@KERNELS
@pytest.mark.parametrize(
    ("remat", "learned"),
    [(False, False), (True, False), (False, True)],
    ids=["kept", "remat", "learned"],
)
def test_no_copies_between_projections_and_kernel(remat, learned, implementation, compile_for):
    """Training a layer with two projections: forward, again forward under remat, backward.

    Learned frequencies keep the inputs; if all channels turn (RoPE-Mixed) the forward pass then
    writes to new arrays.
    """
    case = Case(
        batch=8, tokens=196, heads=6, head_dim=64, pairs=32 if learned else 16, dtype="bfloat16"
    )
    channels = case.heads * case.head_dim

    def layer(x, wq, wk, freqs, coords):
        q, k = ((x @ w).reshape(*x.shape[:2], case.heads, case.head_dim) for w in (wq, wk))
        q, k = turn(case, implementation, q, k, coords, freqs)
        return jnp.sum(jnp.sin(q.astype(jnp.float32) * k.astype(jnp.float32)))

    loss = jax.checkpoint(layer) if remat else layer
    step = jax.value_and_grad(loss, argnums=(0, 1, 2, 3) if learned else (0, 1, 2))
    x = SHAPES((case.batch, case.tokens, channels), case.dtype)
    w = SHAPES((channels, channels), case.dtype)
    _, coords, freqs = rotation_shapes(case)
    program = compile_for((1, 1), step, x, w, w, freqs, coords)
    assert program.launches() in ((2, 3) if remat else (2,))
    assert not {"copy", "transpose"} & set(program.operations)


@KERNELS
def test_vmap_is_still_one_launch_in_place(implementation, compile_for):
    case = Case(batch=8, tokens=49, heads=3, head_dim=32, pairs=8, dtype="bfloat16")
    x, coords, freqs = rotation_shapes(case)
    x, freqs = (SHAPES((5, *y.shape), y.dtype) for y in (x, freqs))
    f = jax.vmap(functools.partial(turn, case, implementation), (0, 0, None, 0))
    program = compile_for((1, 1), f, x, x, coords, freqs, donate=(0, 1))
    assert program.operations == [TARGETS[implementation]]
    assert program.aliased_bytes == 2 * x.size * x.dtype.itemsize


CASE = MODEL_CASES[0]
SPECS = (P("data", None, "heads"), P("data", None, "heads"), P(), P("heads"))


def shard_turn(implementation, **options):
    """Shards `turn` over batch and heads."""
    f = functools.partial(turn, CASE, implementation)
    return jax.shard_map(f, in_specs=SPECS, out_specs=SPECS[:2], **options)


@KERNELS
def test_no_collective_when_sharded_over_batch_and_heads(implementation, compile_for):
    x, coords, freqs = rotation_shapes(CASE)
    f = shard_turn(implementation, check_vma=implementation == "triton")

    def forward_and_backward(q, k, coords, freqs, gq, gk):
        out, vjp = jax.vjp(lambda q, k: f(q, k, coords, freqs), q, k)
        return out, vjp((gq, gk))

    operands, specs = (x, x, coords, freqs, x, x), (*SPECS, *SPECS[:2])
    program = compile_for((4, 2), forward_and_backward, *operands, specs=specs, donate=(0, 1, 4, 5))
    assert program.operations == [TARGETS[implementation]] * 2
    assert program.aliased_bytes == 4 * x.size * x.dtype.itemsize // 8


@KERNELS
def test_zero_gradients_vary_over_devices(implementation, compile_for):
    """Inside shard_map the zeros for the gradient of an unused output vary over devices, too."""
    x, coords, freqs = rotation_shapes(CASE)
    f = shard_turn(implementation, check_vma=implementation == "triton")
    loss = lambda *operands: jnp.sum(jnp.sin(f(*operands)[0].astype(jnp.float32)))
    gradient = jax.grad(loss, argnums=(0, 3))
    program = compile_for((4, 2), gradient, x, x, coords, freqs, specs=SPECS)
    assert program.launches() == 2


def test_mosaic_refuses_types_of_varying_axes(compile_for):
    x, coords, freqs = rotation_shapes(CASE)
    with pytest.raises(ValueError, match=r"'mosaic' cannot serve .*check_vma=False"):
        compile_for((4, 2), shard_turn("mosaic"), x, x, coords, freqs, specs=SPECS)


@KERNELS
def test_more_elements_than_32_bits_can_index(implementation, compile_for):
    case = Case(batch=4096, tokens=3136, heads=12, head_dim=64, pairs=16, dtype="bfloat16")
    x, coords, freqs = rotation_shapes(case)
    assert x.size > 2**32
    f = functools.partial(turn, case, implementation)
    program = compile_for((1, 1), f, x, x, coords, freqs, donate=(0, 1))
    check_in_place(program, implementation, case, [x, x], registers=168)
    # No address comes from a 32-bit count of 2-byte elements. The copy engine takes indices.
    assert not re.search(r"mul\.wide\.[su]32\s+%rd\d+, %r\d+, 2;", program.kernels[0].ptx)
