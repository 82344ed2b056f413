"""The rotary operations against complex numbers in float64, and properties of rotations."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from rope_jax_kernels import Rotation, explain, rotate, rotate_by_angles, rotate_qkv
from rope_jax_kernels.rotary import tile_sizes, unpack_and_rotate
from tests.devices import run_on_devices
from tests.kernels import rotary_cases as cases
from tests.kernels.rotary_cases import Case, angles, bits, draw, turn
from tests.slow import some_slow

B, L, N, D, A, R = 2, 6, 3, 16, 2, 5
PAIRINGS = ["half", "interleaved"]
ones = functools.partial(np.ones, dtype=np.float32)
ONES, FITTING = ones((B, L, N, D)), Rotation(ones((L, A)), ones((N, A, R)))


def check_or_refusal(check, case, implementation, *args):
    """Runs a check if the implementation serves the case; otherwise it must refuse."""
    if cases.serves(implementation, case):
        return check(case, implementation, *args)
    with pytest.raises(ValueError, match=f"'{implementation}' cannot.*(needs|multiple of)"):
        check(case, implementation, *args)


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_values(case, implementation):
    check_or_refusal(cases.check_forward, case, implementation)


PACKED = [case for case in (*cases.CASES[:4], cases.CASES[8]) if case.layout == "BLND"]


@pytest.mark.parametrize("case", some_slow(PACKED, [PACKED[0], PACKED[-1]]), ids=str)
def test_packed_equals_separate(case, implementation):
    check_or_refusal(cases.check_packed, case, implementation)


def test_packed_equals_separate_bit_for_bit_outside_of_jit():
    case = Case(pairing="interleaved")
    q, k, v = map(jnp.asarray, case.data(2, 3))
    rotation = Rotation(*map(jnp.asarray, case.coords_and_freqs()), case.pairing)
    packed = rotate_qkv(jnp.stack([q, k, v], axis=2), rotation)
    for i, x in enumerate((*rotate(q, k, rotation), v)):
        assert np.array_equal(bits(packed[:, :, i]), bits(x))


@pytest.mark.parametrize(
    ("case", "theta_dtype"),
    [(cases.CASES[0], "float32"), (cases.CASES[1], "bfloat16"), (cases.CASES[9], "float16")],
    ids=str,
)
def test_explicit_angles(case, theta_dtype, implementation):
    check_or_refusal(cases.check_by_angles, case, implementation, theta_dtype)


GRADIENTS = [cases.CASES[i] for i in (0, 1, 2, 5, 6, 8, 9)]


@pytest.mark.parametrize("case", some_slow(GRADIENTS, [cases.CASES[i] for i in (1, 9)]), ids=str)
def test_gradients(case, kernel):
    check_or_refusal(cases.check_gradients, case, kernel)


@pytest.mark.parametrize(("dtype", "heads", "launches"), [("bfloat16", N, 1), ("float32", 1, 2)])
def test_q_and_k_of_other_types_are_turned_independently(dtype, heads, launches, kernel):
    """Another number of heads needs a second launch."""
    case = Case(pairs=4, shared=True)
    q, k, *terms = map(jnp.asarray, (*case.data(14, 2), *case.coords_and_freqs()))
    k = k[:, :, :heads].astype(dtype)
    f = lambda q, k: cases.run(case, kernel, q, k, *terms)
    for x, source in zip(jax.jit(f)(q, k), (q, k), strict=True):
        alone, _ = jax.jit(f)(source, source)
        assert x.dtype == source.dtype
        assert np.array_equal(bits(x), bits(alone))
    launch = "mpmd_map[" if kernel == "mosaic" else "pallas_call["
    assert str(jax.make_jaxpr(f)(q, k)).count(launch) == launches


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_programs_of_many_batch_items(pairing, interpreted, monkeypatch):
    # Simulates a large problem: two programs, the second with fewer items.
    monkeypatch.setattr(tile_sizes, "PROGRAMS", 2)
    case = Case(batch=11, heads=1, pairing=pairing)
    assert tile_sizes.plan_tile(11, 6, 5, 16, 4, pairing).batch == 8
    (cases.check_forward if pairing == "half" else cases.check_gradients)(case, "triton")


@pytest.mark.parametrize(
    ("check", "bytes_in_flight"),
    [
        pytest.param(cases.check_forward, tile_sizes.BYTES_IN_FLIGHT, marks=pytest.mark.slow),
        (cases.check_forward, 0),
        (cases.check_gradients, tile_sizes.BYTES_IN_FLIGHT),
        pytest.param(cases.check_gradients, 0, marks=pytest.mark.slow),
    ],
    ids=["forward many slots", "forward two slots", "gradients many slots", "gradients two slots"],
)
def test_a_program_streams_many_batch_items(check, bytes_in_flight, interpreted, monkeypatch):
    monkeypatch.setattr(tile_sizes, "PROGRAMS", 1)
    monkeypatch.setattr(tile_sizes, "BYTES_IN_FLIGHT", bytes_in_flight)
    case = Case(batch=19, tokens=49, heads=1, head_dim=32, pairs=8, dtype="bfloat16")
    tile = tile_sizes.plan_streamed_tile(19, 49, 1, 8, 2, copies=2)
    assert (tile.tokens, tile.batch, tile.slots) == (64, 32, 2 if bytes_in_flight == 0 else 8)
    check(case, "mosaic")


@hypothesis.settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(data=st.data())
def test_any_shape(data, a_kernel):
    # "mosaic" serves multiples of 4 pairs of float32 (`serves`); another test has its refusals.
    limits = {"step": 4, "pairing": "half"} if a_kernel == "mosaic" else {}
    case = data.draw(cases.any_case(**limits))
    q, k = case.data(0, 2)
    coords, freqs = case.coords_and_freqs()
    out = jax.jit(functools.partial(cases.run, case, a_kernel))(q, k, coords, freqs)
    for x, y in zip((q, k), out, strict=True):
        exact = turn(x, angles(coords, freqs), case.pairing)
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=2e-5)
        assert np.array_equal(bits(y)[..., 2 * case.pairs :], bits(x)[..., 2 * case.pairs :])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_values_and_gradients_match_the_closed_form(pairing, shared):
    """All computations are in float64."""
    case = Case(pairing=pairing, shared=shared, dtype="float64")
    q, k, *cotangents = case.data(6, 4)
    coords, freqs = case.coords_and_freqs()

    @jax.jit
    def values_and_gradients(cotangents, *args):
        out, pull_back = jax.vjp(functools.partial(cases.run, case, "xla"), *args)
        return out, pull_back(cotangents)

    with jax.enable_x64(True):
        args = map(np.float64, (q, k, coords, freqs))
        out, gradients = values_and_gradients(tuple(cotangents), *args)
    theta = angles(coords, freqs)
    for x, y in zip((q, k), out, strict=True):
        np.testing.assert_allclose(y, turn(x, theta, pairing), rtol=1e-13, atol=1e-13)
    exact = cases.exact_gradients(case, cotangents, q, k, coords, freqs)
    for x, expected in zip(gradients, exact, strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-10, atol=1e-10)


def test_rotation_is_a_pytree_of_two_arrays():
    rotation = Rotation(jnp.ones((L, A)), jnp.ones((N, A, R)), "interleaved")
    doubled = jax.tree.map(lambda x: 2 * x, rotation)
    assert (len(jax.tree.leaves(rotation)), doubled.pairing) == (2, "interleaved")
    assert np.array_equal(doubled.angles(), 4 * rotation.angles())


def test_coordinates_may_be_integers_lists_or_numpy_arrays():
    places = np.arange(L * A).reshape(L, A)
    for coords in (places, places.tolist(), jnp.asarray(places)):
        rotation = Rotation(coords, FITTING.freqs)
        assert rotation.coords.dtype == jnp.float32
        assert np.array_equal(rotation.coords, places)
    rotation = Rotation(np.float64(places), np.float64(FITTING.freqs))
    assert rotation.coords.dtype == rotation.freqs.dtype == jnp.float32
    with jax.enable_x64(True):
        assert Rotation(np.float64(places), FITTING.freqs).coords.dtype == jnp.float64
        # kernels take no float64
        assert Rotation(places.tolist(), FITTING.freqs).coords.dtype == jnp.float32
    assert jax.tree.map(np.shape, rotation) == Rotation((L, A), (N, A, R))  # placeholders stay


def test_a_batch_may_be_empty():
    def loss(q, coords, freqs):
        rotation = Rotation(coords, freqs)
        packed = rotate_qkv(jnp.stack([q, q, q], axis=2), rotation)
        assert packed.shape == (0, L, 3, N, D)
        parts = *rotate(q, q, rotation), *unpack_and_rotate(packed, rotation)
        return sum(x.sum() for x in parts)

    arguments = ONES[:0], FITTING.coords, FITTING.freqs
    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*arguments)
    assert [x.shape for x in gradients] == [x.shape for x in arguments]
    assert not any(np.any(x) for x in gradients)


VMAPS = [
    ((0, 0, None, None), 0),
    ((2, 4, None, None), 3),
    ((None, 1, 0, None), 1),
    ((3, None, None, 3), 4),
    ((None, None, 1, 2), 0),
]


VMAP_CASES = [
    *(("triton", axes) for axes in VMAPS),
    *(("mosaic", axes) for axes in VMAPS[2:4]),
    *(("xla", axes) for axes in VMAPS),
]


@pytest.mark.parametrize(
    ("kernel", "axes"), some_slow(VMAP_CASES, [VMAP_CASES[1], *VMAP_CASES[-2:]])
)
def test_vmap_over_any_axis(kernel, axes, interpreted):
    in_axes, out_axis = axes
    plain = list(map(jnp.asarray, draw(10, (B, L, N, D), (B, L, N, D), (L, A), (N, A, 4))))
    args = [
        x if axis is None else jnp.stack([x, 2 * x, -x], axis)
        for x, axis in zip(plain, in_axes, strict=True)
    ]

    def values_and_gradients(implementation, *args):
        turn_pair = lambda *args: rotate(
            *args[:2], Rotation(*args[2:]), implementation=implementation
        )
        out, pull_back = jax.vjp(turn_pair, *args)
        return out, pull_back(tuple(3 * x**2 for x in out))

    out_axes = ((out_axis,) * 2, (0,) * 4)
    mapped = jax.jit(jax.vmap(functools.partial(values_and_gradients, kernel), in_axes, out_axes))(
        *args
    )
    expected = jax.jit(functools.partial(values_and_gradients, "xla"))
    for i, scale in enumerate((1, 2, -1)):
        part = [x if axis is None else scale * x for x, axis in zip(plain, in_axes, strict=True)]
        out, gradients = expected(*part)
        for x, y in zip(mapped[0], out, strict=True):
            np.testing.assert_allclose(np.take(np.asarray(x), i, out_axis), y, rtol=1e-5, atol=2e-5)
        for x, y in zip(mapped[1], gradients, strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-4, atol=1e-4 * np.abs(y).max())


def test_nested_vmap_of_gradients(interpreted):
    """Frequencies along the inner axis, data and coordinates along the outer one."""
    coords, freqs = (jnp.asarray(x) for x in draw(11, (2, 3, A), (2, 1, A, 4)))
    x = jnp.asarray(draw(12, (2, 1, 3, 1, D))[0])

    def loss(implementation, x, coords, freqs):
        rotation = Rotation(coords, freqs)
        return sum(jnp.sum(y**3) for y in rotate(x, x, rotation, implementation=implementation))

    def nested(implementation):
        f = jax.grad(functools.partial(loss, implementation), (0, 2))
        inner = jax.vmap(f, (None, None, 0))
        return jax.jit(jax.vmap(inner, (0, 0, None)))(x, coords, freqs)

    for y, expected in zip(nested("mosaic"), nested("xla"), strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_scan_and_remat(implementation):
    """Two layers with different frequencies, as backbones stack them."""
    q, k, coords, freqs = map(
        jnp.asarray, draw(11, (B, L, N, D), (B, L, N, D), (L, A), (2, N, A, 4))
    )
    # jax.checkpoint refuses side effects, and so the callbacks of Mosaic GPU's interpret mode;
    # tests/aot compiles it.
    remat = (lambda f: f) if implementation == "mosaic" else jax.checkpoint

    def stack(q, k, freqs, implementation):
        layer = remat(
            lambda qk, f: (rotate(*qk, Rotation(coords, f), implementation=implementation), None)
        )
        return jax.lax.scan(layer, (q, k), freqs)[0]

    loss = lambda *args: sum(jnp.sum(x**3) for x in stack(*args))
    gradients = jax.jit(jax.grad(loss, argnums=(0, 2)), static_argnums=3)
    results = (gradients(q, k, freqs, name) for name in (implementation, "xla"))
    for x, expected in zip(*results, strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_only_gradients_of_angles_save_inputs(a_kernel):
    q, k, coords, freqs = map(jnp.asarray, draw(12, (B, L, N, D), (B, L, N, D), (L, A), (N, A, 4)))
    f = lambda q, k, freqs: rotate(q, k, Rotation(coords, freqs), implementation=a_kernel)
    saved = lambda vjp: sum(x.size for x in jax.tree.leaves(vjp))
    assert saved(jax.vjp(lambda q, k: f(q, k, freqs), q, k)[1]) == coords.size + freqs.size
    assert saved(jax.vjp(f, q, k, freqs)[1]) == coords.size + freqs.size + q.size + k.size
    # Under jit, where flags of what is differentiated pass through a trace, too.
    assert saved(jax.vjp(jax.jit(lambda q, k: f(q, k, freqs)), q, k)[1]) <= coords.size + freqs.size


def test_second_derivative_of_the_data(implementation):
    q, coords, freqs = map(jnp.asarray, draw(13, (B, L, N, D), (L, A), (N, A, 4)))
    loss = lambda q: jnp.sum(
        rotate(q, q, Rotation(coords, freqs), implementation=implementation)[0] ** 3
    )
    curvature = jax.jit(jax.grad(lambda q: jnp.sum(jax.grad(loss)(q) ** 2)))(q)
    rotated = turn(q, angles(np.asarray(coords), np.asarray(freqs)), "half")
    # loss' = R^T 3 y^2, so |loss'|^2 = 9 sum y^4, whose gradient is R^T 36 y^3.
    expected = turn(36 * rotated**3, -angles(np.asarray(coords), np.asarray(freqs)), "half")
    np.testing.assert_allclose(curvature, expected, rtol=1e-4, atol=1e-3)


# Not with "mosaic": all devices share the state of its interpret mode. tests/aot compiles it.
SHARDED = """
import jax, numpy as np
from functools import partial
from jax.sharding import AxisType, PartitionSpec as P
from rope_jax_kernels import Rotation, rotate
rng = np.random.default_rng(0)
shapes = (4, 6, 4, 16), (4, 6, 4, 16), (6, 2), (4, 2, 5)
args = q, k, coords, freqs = [rng.standard_normal(s).astype(np.float32) for s in shapes]
mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
one = lambda implementation, q, k, c, f: rotate(q, k, Rotation(c, f), implementation=implementation)
specs = P("data", None, "heads"), P("data", None, "heads"), P(), P("heads")
loss = lambda f: lambda *args: (sum((x**3).sum() for x in f(*args)), f(*args))
gradients = lambda f: jax.jit(jax.grad(loss(f), argnums=(0, 1, 2, 3), has_aux=True))(*args)
shard = partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=specs[:2])
expected = gradients(partial(one, "xla"))
# Pallas' interpret mode has no rule for types that say over which devices they vary.
for f in (shard(partial(one, "xla")), shard(partial(one, "triton"), check_vma=False)):
    for x, y in zip(jax.tree.leaves(gradients(f)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.process
def test_sharded_over_batch_and_heads(interpreted):
    run_on_devices(4, SHARDED)


def test_float32_data_with_float64_enabled(x64, kernel):
    cases.check_forward(Case(tokens=7, pairs=4), kernel)


FOUR = Rotation(FITTING.coords, FITTING.freqs[:1, :, :4])
NARROW, WIDE = ONES.astype(jnp.bfloat16), jax.ShapeDtypeStruct(ONES.shape, "float64")
KERNELS = ("triton", "mosaic")
REFUSALS = [
    (rotate, (ONES, ONES, dataclasses.replace(FOUR, pairing="interleaved")), "interleaved"),
    (rotate, (ONES, ONES, FITTING), "5 pairs, and its tiles need a multiple of 4"),
    (rotate, (*[ones((B, L, N, 18))] * 2, FOUR), "q has heads of 18 float32"),
    (rotate_by_angles, (NARROW[..., :8], ones((N, L, 4))), "halves of heads of 4 bfloat16"),
    (rotate_by_angles, (ONES, np.ones((N, L, 4), jnp.bfloat16)), "theta has rows of 4 bfloat16"),
]


@pytest.mark.parametrize(
    ("name", "op", "args", "reason"),
    [
        *(("mosaic", *refusal) for refusal in REFUSALS),
        *((name, rotate, (ONES[:0], ONES, FOUR), "nothing to compute") for name in KERNELS),
        *((name, rotate, (ONES[:, :, :0], ONES, FOUR), "nothing") for name in KERNELS),
        *((name, rotate, (WIDE, WIDE, FOUR), "dtype float64; float16,") for name in KERNELS),
    ],
)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")  # as of the call itself
@pytest.mark.usefixtures("interpreted", "unchecked_annotations")
def test_kernels_say_why_they_refuse(name, op, args, reason):
    assert reason in explain(op, *args)[name]


CHANGED = functools.partial(dataclasses.replace, FITTING)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: rotate(ONES.astype(np.int32), ONES, FITTING), TypeError, "q has dtype int32"),
        (lambda: rotate(ONES, ONES[:, 1:], FITTING), ValueError, "6 tokens, but k has 5"),
        (lambda: rotate(ONES, ONES[:, :, :1], FITTING), ValueError, "3 heads, but k has 1"),
        (lambda: rotate(ONES[..., :8], ONES, FITTING), ValueError, "10 channels.* at most 4 pairs"),
        (lambda: rotate(ONES, ONES, FITTING, layout="NLBD"), ValueError, "layout='NLBD'"),
        (lambda: rotate(ONES[0], ONES, FITTING), ValueError, r"\(6, 3, 16\).*4 dimensions"),
        (
            lambda: rotate(ONES, ONES, CHANGED(coords=FITTING.coords[:, :1])),
            ValueError,
            "the same A",
        ),
        (
            lambda: rotate(ONES, ONES, CHANGED(coords=FITTING.coords.astype(bool))),
            TypeError,
            "coords has dtype bool",
        ),
        (
            lambda: rotate(ONES, ONES, CHANGED(freqs=FITTING.freqs.astype(np.int32))),
            TypeError,
            "freqs has dtype int32",
        ),
        (lambda: rotate_qkv(ONES[:, :, None], FITTING), ValueError, r"\[B, L, 3, N, D\]"),
        (lambda: rotate_qkv(ones((B, 7, 3, N, D)), FITTING), ValueError, "6.*but qkv has 7"),
        (lambda: rotate_by_angles(ONES, ones((2, L, R))), ValueError, r"\[3 or 1, 6, R\]"),
        (lambda: rotate_by_angles(ONES, ones((N, L, 9))), ValueError, "18 channels"),
        (
            lambda: rotate_by_angles(ONES.astype(bool), ones((N, L, R))),
            TypeError,
            "x has dtype bool",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_errors_say_what_to_change(call, error, words):
    with pytest.raises(error, match=words):
        call()
