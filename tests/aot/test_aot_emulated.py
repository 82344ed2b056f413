"""The kernels' PTX, run on small arrays by `tests.ptx`: no error, and as exact as XLA.

Results are compared with the reference implementation in float64. Their error may be twice that of
the reference in the same dtype, plus one rounding of the largest element; in float32 two, as in
`rope_jax_kernels.accuracy`, because weights are recomputed from the logarithm of their sum.
"""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._gpus import A100, B200, H200, absent_gpus
from rope_jax_kernels import (
    Global,
    Neighborhood,
    Rotation,
    Window,
    attention,
    attention_qkv,
    dispatch,
    rotate,
    rotate_by_angles,
    rotate_qkv,
)
from rope_jax_kernels.attention import mosaic_program, plans
from rope_jax_kernels.rotary import tile_sizes, unpack_and_rotate
from rope_jax_kernels.tuning.tiles import attention_tiles
from tests.aot.program import run_alone
from tests.kernels.rotary_cases import CASES, Case, draw, serves
from tests.ptx.capture import Emulator


def check(f, arrays, gpu):
    """Emulates f("triton", *arrays) or f("mosaic", *arrays) and compares f("xla", *arrays).

    Args:
        f: of the name of an implementation, and of arrays.
        arrays: trees of arguments.
        gpu: device for which kernels are compiled, and the implementation.
    """
    device, implementation = gpu
    emulator = Emulator(device)
    results = emulator(functools.partial(f, implementation), *arrays)
    assert emulator.launches
    assert not emulator.findings, str(emulator.findings)
    assert is_exact(results, functools.partial(f, "xla"), arrays)


def is_exact(results, reference, arrays):
    """True if results are as exact as those of a reference in the same dtype, see above."""
    # The reference runs once: compiled fast, it is ready sooner.
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    reference = jax.jit(reference, compiler_options=fast)
    plain = reference(*arrays)
    with jax.enable_x64(True):
        exact = reference(*jax.tree.map(lambda x: np.asarray(x, np.float64), arrays))
    # The gradient of float32 frequencies or a bias is as exact as the data it comes from.
    coarsest = max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(arrays))
    for x, y, true in zip(*map(jax.tree.leaves, (results, plain, exact)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y, true = (np.asarray(z, np.float64) for z in (x, y, true))
        floor = (2 if coarsest < 1e-6 else 1) * coarsest * np.abs(true).max()
        if not np.abs(x - true).max() <= 2 * np.abs(y - true).max() + floor:
            return False
    return True


# Rotations


def rotate_all(case, implementation, q, k, coords, freqs, gq, gk):
    """Rotated q and k, the gradients of all arguments, and those of data alone."""

    def f(q, k, coords, freqs):
        rotation = Rotation(coords, freqs, case.pairing)
        return rotate(q, k, rotation, layout=case.layout, implementation=implementation)

    out, pull = jax.vjp(f, q, k, coords, freqs)
    _, pull_data = jax.vjp(lambda q, k: f(q, k, coords, freqs), q, k)
    return out, pull((gq, gk)), pull_data((gk, gq))


def rotate_packed(case, implementation, qkv, coords, freqs, cotangent):
    def f(qkv, freqs):
        return rotate_qkv(qkv, Rotation(coords, freqs, case.pairing), implementation=implementation)

    out, pull = jax.vjp(f, qkv, freqs)
    return out, pull(cotangent)


def rotate_angles(case, implementation, x, theta, cotangent):
    def f(x, theta):
        names = {"pairing": case.pairing, "layout": case.layout}
        return rotate_by_angles(x, theta, implementation=implementation, **names)

    out, pull = jax.vjp(f, x, theta)
    return out, pull(cotangent)


def unpack(case, implementation, qkv, coords, freqs, cotangents):
    def f(qkv, freqs):
        rotation = Rotation(coords, freqs, case.pairing)
        return unpack_and_rotate(qkv, rotation, implementation=implementation)

    out, pull = jax.vjp(f, qkv, freqs)
    return out, pull(cotangents)


def operands(case, operation):
    """Arrays for one of the functions above."""
    dtype, terms = jnp.dtype(case.dtype), case.coords_and_freqs()
    packed = (case.batch, case.tokens, 3, case.heads, case.head_dim)
    apart = (case.batch, case.tokens, case.heads, case.head_dim)
    if operation is rotate_all:
        q, k, gq, gk = draw(5, *[case.shape()] * 4, dtype=dtype)
        return q, k, *terms, gq, gk
    if operation is rotate_packed:
        qkv, cotangent = draw(6, packed, packed, dtype=dtype)
        return qkv, *terms, cotangent
    if operation is rotate_angles:
        x, cotangent = draw(7, *[case.shape()] * 2, dtype=dtype)
        theta = np.einsum("la,nar->nlr", *terms)
        return x, theta, cotangent
    qkv, *cotangents = draw(8, packed, apart, apart, apart, dtype=dtype)
    return qkv, *terms, tuple(cotangents)


# Several examples of a program, tiles that are partly filled, rows that no vector divides.
MORE = [
    Case(batch=7, tokens=11, head_dim=64, pairs=32, dtype="bfloat16"),
    Case(batch=33, tokens=5, head_dim=32, pairs=8, dtype="bfloat16", layout="BNLD"),
    Case(batch=65, tokens=9, heads=1, head_dim=96, pairs=24, axes=3, shared=True, dtype="bfloat16"),
    Case(tokens=7, heads=5, head_dim=31, pairs=15, dtype="bfloat16"),
    Case(batch=19, tokens=131, head_dim=64, pairs=16, dtype="bfloat16", prefix=1),
    Case(batch=3, tokens=77, heads=2, head_dim=64, pairs=32),
    Case(batch=64, tokens=17, heads=4, head_dim=248, pairs=120, dtype="bfloat16"),
]
OPERATIONS = [rotate_all, rotate_packed, rotate_angles, unpack]
ROTATIONS = [
    pytest.param(kind, implementation, operation, case, id=f"{name}-{operation.__name__}-{case}")
    for kind, implementation, cases in (
        (H200, "triton", CASES + MORE),
        (A100, "triton", CASES[:4] + MORE[:2]),
        (B200, "triton", CASES[:4] + MORE[:2]),
        (H200, "mosaic", CASES + MORE),
    )
    for case in cases
    if serves(implementation, case)
    for operation in OPERATIONS
    if operation is rotate_all or operation is rotate_angles or case.layout == "BLND"
    if (operation, implementation) != (unpack, "mosaic")
    for name in [f"{kind.split()[1]}-{implementation}"]
]


@pytest.mark.parametrize(("kind", "implementation", "operation", "case"), ROTATIONS)
def test_rotation(kind, implementation, operation, case, gpu_of):
    f = functools.partial(operation, case)
    check(f, operands(case, operation), (gpu_of(kind), implementation))


# Attention


@dataclasses.dataclass(frozen=True)
class Attention:
    """A call of attention and its gradients.

    Attributes:
        pattern, places, heads, head_dim, pairs, batch, dtype: as in `_model_shapes.Layer`.
        axes: of the coordinates.
        pairing: of the rotation.
        bias: whether there is one.
        shared: whether heads share frequencies.
        packed: whether q, k and v are one array.
        learned: whether frequencies have a gradient.
        scale: of the logits.
    """

    pattern: object
    places: tuple[int, ...]
    head_dim: int = 32
    pairs: int = 8
    heads: int = 1
    batch: int = 2
    dtype: str = "bfloat16"
    axes: int = 2
    pairing: str = "half"
    bias: bool = False
    shared: bool = False
    packed: bool = True
    learned: bool = True
    scale: float | None = None

    __str__ = Case.__str__

    def arrays(self):
        """data, coords, freqs, bias and the cotangent."""
        lead, last, dtype = (self.batch, *self.places), (self.heads, self.head_dim), self.dtype
        shapes = [(*lead, 3, *last)] if self.packed else [(*lead, *last)] * 3
        *data, cotangent = draw(9, *shapes, (*lead, *last), dtype=jnp.dtype(dtype))
        tokens, heads = self.pattern.rotated_tokens(self.places), 1 if self.shared else self.heads
        coords, freqs, bias = draw(
            10,
            (tokens, self.axes),
            (heads, self.axes, max(1, self.pairs)),
            self.pattern.bias_shape(self.heads, self.places) if self.bias else (1,),
        )
        return tuple(data), coords, freqs, bias, cotangent

    def __call__(self, implementation, data, coords, freqs, bias, cotangent, tile=()):
        """The output, and the gradients of the data and of what else is learned."""

        def f(data, freqs, bias):
            arguments = {
                "pattern": self.pattern,
                "rotation": Rotation(coords, freqs, self.pairing) if self.pairs else None,
                "bias": bias if self.bias else None,
                "scale": self.scale,
            }
            if tile and implementation != "xla":
                arguments = {"qkv": data[0]} | arguments
                return dispatch.run("attention_qkv", implementation, arguments, tile)
            call = attention_qkv if self.packed else attention
            return call(*data, implementation=implementation, **arguments)

        if self.learned:
            out, pull = jax.vjp(f, data, freqs, bias)
        else:
            out, pull = jax.vjp(lambda data: f(data, freqs, bias), data)
        return out, pull(cotangent)


WINDOWS = [
    Attention(Window((7, 7), (3, 3)), (14, 10), bias=True),
    Attention(Window((7, 7), (3, 3)), (14, 7), head_dim=64, pairs=16, bias=True),
    Attention(Window((7, 7), (3, 2)), (10, 17), bias=True, batch=3),
    Attention(Window((7, 7)), (9, 8), pairs=16, packed=False, batch=5),
    Attention(Window((12, 12), (6, 6)), (13, 25), bias=True, batch=1),
    Attention(
        Window((3, 5), (1, 4)), (7, 11), 24, 5, heads=3, pairing="interleaved", bias=True, batch=9
    ),
    Attention(Window((7, 7), (3, 3)), (5, 9), head_dim=48, pairs=12, bias=True, heads=3),
    Attention(Window((2, 2), (1, 1)), (5, 5), head_dim=16, pairs=4, bias=True, batch=33),
    Attention(Window((8, 8), (4, 4)), (16, 16), pairs=0, bias=True, batch=1),
]
GLOBAL = [
    Attention(Global(), (1,), head_dim=16, pairs=2, batch=3),
    Attention(Global(), (2,), pairs=16, batch=3, bias=True),
    Attention(Global(), (17,), 64, 32, heads=2, packed=False, pairing="interleaved"),
    Attention(Global(), (65,), head_dim=80, pairs=20, heads=3, batch=1),
    Attention(Global(), (65,), head_dim=128, pairs=64, batch=1, bias=True),
    Attention(Global(), (129,), pairs=6, axes=3, shared=True, batch=1, heads=3),
    Attention(Global(), (100,), head_dim=24, pairs=0, scale=-0.3, batch=1),
    Attention(Global(), (64,), head_dim=96, pairs=33, batch=1),
    Attention(Global(), (197,), head_dim=64, pairs=16, batch=1),
    Attention(Global(), (77,), head_dim=64, pairs=16, bias=True, batch=3, learned=False),
]
NEIGHBORHOODS = [
    Attention(Neighborhood((7, 7)), (14, 14), bias=True),
    Attention(Neighborhood((7, 7)), (14, 14), pairs=16, batch=1, heads=2),
    Attention(Neighborhood((3, 5)), (9, 13), bias=True, packed=False),
    Attention(Neighborhood((4, 2), (2, 3)), (11, 17), 16, 4, bias=True, heads=2, batch=1),
    Attention(Neighborhood((7, 7)), (5, 20), bias=True),
    Attention(Neighborhood((13, 13)), (15, 14), bias=True, batch=1),
    Attention(Neighborhood((7, 7), (4, 4)), (13, 30), bias=True, batch=1),
    Attention(Neighborhood((16, 16)), (17, 16), head_dim=128, pairs=64, batch=1),
    Attention(Neighborhood((1, 1)), (3, 4), head_dim=16, bias=True, batch=3),
]
# One of each pattern, ragged, with a bias where there are gradients of it.
SOME = [WINDOWS[2], GLOBAL[3], GLOBAL[9], NEIGHBORHOODS[2], NEIGHBORHOODS[3]]
CLOSED = [WINDOWS[3], WINDOWS[7], GLOBAL[2]]  # all gradients by one kernel
MOSAIC = [
    Attention(Global(), (50,), head_dim=64, pairs=16, batch=3),
    Attention(Global(), (197,), head_dim=64, pairs=16),
    Attention(Global(), (65,), head_dim=64, pairs=32, packed=False),
    Attention(Global(), (129,), packed=False, heads=3, batch=1),
    Attention(Global(), (100,), head_dim=128, pairs=32, batch=1),
    Attention(Global(), (64,), head_dim=64, pairs=0, batch=5),
    Attention(Global(), (1,), head_dim=64, pairs=16),
    Attention(Global(), (300,), head_dim=64, pairs=16, shared=True, batch=1),
    Attention(Global(), (17,), head_dim=64, axes=3, batch=37),
    Attention(Global(), (130,), head_dim=64, pairs=16, learned=False),
]
MOSAIC_WINDOWS = [
    *(WINDOWS[i] for i in (0, 1, 2, 3, 4, 8)),
    Attention(Window((3, 5), (1, 4)), (7, 11), heads=2, bias=True, batch=3, shared=True),
    Attention(Window((7, 7), (3, 3)), (7, 14), head_dim=64, pairs=32, packed=False, learned=False),
    Attention(Window((2, 2), (1, 1)), (5, 4), bias=True, axes=3, scale=-0.3),
    Attention(Window((9, 9), (4, 5)), (11, 9), head_dim=64, pairs=16, bias=True),
    Attention(Window((12, 12)), (12, 14), pairs=0, batch=1),
    Attention(Window((8, 8), (0, 3)), (8, 17), pairs=16, packed=False, batch=1),
]
# With tiles of 8 x 8 and 16 x 4 tokens, boxes of 16 and 32 columns, and classes of few members.
MOSAIC_NEIGHBORHOODS = [
    Attention(Neighborhood((7, 7)), (18, 12), bias=True, heads=2, batch=1),
    Attention(Neighborhood((3, 5), (2, 1)), (10, 13), bias=True, packed=False),
    Attention(Neighborhood((7, 7), (2, 2)), (16, 22), heads=2, shared=True, batch=1),
    Attention(Neighborhood((3, 3), (1, 2)), (4, 6), pairs=0, bias=True, batch=3, scale=0.7),
    Attention(Neighborhood((5, 5)), (9, 17), head_dim=64, pairs=32, packed=False, batch=1),
    Attention(Neighborhood((4, 2)), (11, 9), bias=True, axes=3, batch=1),
    Attention(Neighborhood((7, 7)), (5, 20), pairs=16, learned=False),
    Attention(Neighborhood((9, 9)), (20, 17), batch=1),
    Attention(Neighborhood((11, 11)), (12, 22), bias=True, batch=1),
    Attention(Neighborhood((13, 13)), (15, 14), head_dim=64, pairs=16, bias=True, batch=1),
    Attention(Neighborhood((10, 12)), (13, 29), batch=1),
    # A tile and a box as wide as the map, whose numbers must not be written past its end.
    Attention(Neighborhood((3, 3)), (7, 8), bias=True),
    Attention(Neighborhood((3, 3)), (9, 16), heads=2, batch=1),
]


def with_dtype(cases, dtype):
    return [dataclasses.replace(case, dtype=dtype) for case in cases]


CALLS = [
    pytest.param(kind, implementation, case, id=f"{kind.split()[1]}-{implementation}-{case}")
    for kind, implementation, cases in (
        (H200, "triton", WINDOWS + GLOBAL + NEIGHBORHOODS),
        (H200, "triton", with_dtype(SOME, "float16")),
        (H200, "triton", with_dtype([*SOME, WINDOWS[7], GLOBAL[4]], "float32")),
        (A100, "triton", [*SOME, *with_dtype([*SOME, WINDOWS[7]], "float32"), *CLOSED]),
        (B200, "triton", [*SOME, *with_dtype([*SOME[:3], WINDOWS[7]], "float32"), *CLOSED]),
        (H200, "mosaic", MOSAIC + MOSAIC_WINDOWS + MOSAIC_NEIGHBORHOODS),
        (H200, "mosaic", with_dtype(MOSAIC_WINDOWS[1:3], "float16")),
        (H200, "mosaic", with_dtype([*MOSAIC[:3], MOSAIC_NEIGHBORHOODS[1]], "float16")),
    )
    for case in cases
]


@pytest.mark.parametrize(("kind", "implementation", "case"), CALLS)
def test_attention(kind, implementation, case, gpu_of):
    check(case, case.arrays(), (gpu_of(kind), implementation))


def check_on_blackwell(calls):
    for f, arrays in calls:
        check(f, arrays(), (absent_gpus(kind=B200)[0], "mosaic"))


ON_BLACKWELL = [
    [
        (functools.partial(operation, case), functools.partial(operands, case, operation))
        for case in (CASES[2], CASES[8], MORE[5])
    ]
    for operation in (rotate_all, rotate_packed, rotate_angles)
]
ON_BLACKWELL += [
    [(case, case.arrays) for case in (MOSAIC_NEIGHBORHOODS[1], MOSAIC_NEIGHBORHOODS[9])]
]


@pytest.mark.parametrize("calls", ON_BLACKWELL, ids=[*(f.__name__ for f in OPERATIONS[:3]), "NAT"])
def test_mosaic_on_blackwell(calls):
    run_alone(check_on_blackwell, calls)


# Windows at real batches: programs of several examples, which load the next one while they compute.
PIPELINED = [
    Attention(Window((7, 7), (3, 3)), (9, 8), bias=True, batch=19),
    Attention(Window((7, 7), (3, 3)), (7, 14), batch=17),
    Attention(Window((7, 7)), (7, 7), pairs=16, batch=11),
    Attention(Window((7, 7), (3, 3)), (7, 14), head_dim=64, pairs=16, batch=9),
    Attention(Window((7, 7)), (7, 7), head_dim=64, pairs=16, batch=9, bias=True),
    Attention(Window((7, 7), (3, 3)), (8, 8), pairs=0, bias=True, batch=9),
    Attention(Window((7, 7), (3, 3)), (7, 14), packed=False, batch=9),
    Attention(Window((7, 7), (3, 3)), (7, 14), batch=9, learned=False),
    Attention(Window((8, 8), (4, 4)), (8, 8), pairing="interleaved", bias=True, batch=9),
    Attention(Window((4, 4), (2, 2)), (5, 7), head_dim=48, pairs=12, batch=9, dtype="float16"),
]


ON_A100 = [case for case in PIPELINED if not case.bias]  # the others run on an H200 alone


@pytest.mark.parametrize(
    ("kind", "case"), [*((H200, x) for x in PIPELINED), *((A100, x) for x in ON_A100)], ids=str
)
def test_programs_of_several_examples(kind, case, gpu_of):
    with mock.patch.object(plans, "PROGRAMS", 1):  # as if there were programs enough
        check(case, case.arrays(), (gpu_of(kind), "triton"))


@contextlib.contextmanager
def few_programs():
    """Kernels for Mosaic GPU compute several examples in each program, as at real batches."""
    with (
        mock.patch.object(mosaic_program, "MULTIPROCESSORS", 1),
        # Two slots, which many examples pass through.
        mock.patch.multiple(tile_sizes, PROGRAMS=1, BYTES_IN_FLIGHT=1),
    ):
        yield


@pytest.mark.parametrize(
    "case",
    [
        Case(batch=19, tokens=131, head_dim=64, pairs=16, dtype="bfloat16", prefix=1),
        Case(batch=7, tokens=53, heads=2, head_dim=32, pairs=16, layout="BNLD"),
        Attention(Global(), (130,), head_dim=64, pairs=16, batch=5),
        Attention(Global(), (300,), batch=3),
        Attention(Window((7, 7), (3, 3)), (8, 7), bias=True, batch=5),
        Attention(Window((10, 10), (5, 5)), (10, 11), head_dim=64, pairs=16, bias=True, batch=5),
        Attention(Window((12, 12), (6, 6)), (12, 13), bias=True, batch=3),
        Attention(Neighborhood((7, 7)), (10, 9), bias=True, batch=5),
    ],
    ids=str,
)
def test_mosaic_programs_of_several_examples(case, gpu_of):
    rotates = isinstance(case, Case)
    f = functools.partial(rotate_all, case) if rotates else case
    arrays = operands(case, rotate_all) if rotates else case.arrays()
    with few_programs():
        check(f, arrays, (gpu_of(H200), "mosaic"))


# The number of tiles that `tune` measures for a call.
TILED = {
    Attention(Global(), (50,), head_dim=64, pairs=16): 7,
    Attention(Global(), (100,), head_dim=64, pairs=16, batch=1): 10,
    Attention(Window((7, 7)), (7, 7)): 8,
    Attention(Window((7, 7), (3, 3)), (9, 13), bias=True, batch=3): 8,
    Attention(Neighborhood((7, 7)), (13, 17), batch=1): 10,
}


@pytest.mark.parametrize(
    ("case", "number"), [(case, n) for case, tiles in TILED.items() for n in range(tiles)], ids=str
)
def test_tiles_that_are_measured(case, number, gpu_of):
    data, coords, freqs, bias, _ = case.arrays()
    with jax.sharding.use_abstract_mesh(mesh_of(gpu_of(H200))):
        tiles = attention_tiles(
            True,
            {
                "qkv": data[0],
                "pattern": case.pattern,
                "rotation": Rotation(coords, freqs),
                "bias": jnp.asarray(bias) if case.bias else None,
                "scale": None,
            },
        )
    assert len(tiles) == TILED[case]
    f = functools.partial(case, tile=tiles[number])
    check(f, case.arrays(), (gpu_of(H200), "triton"))


def mesh_of(gpu):
    return jax.sharding.Mesh(np.array([gpu]), ("data",)).abstract_mesh
