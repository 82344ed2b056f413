"""Cases and checks for every implementation of the rotary operations, against float64 in NumPy.

Run on the CPU (kernels in interpret mode) by tests/kernels/test_rotary.py, on a GPU by
tests/gpu/test_gpu_rotary.py, and compiled ahead of time by tests/aot/test_aot_rotary.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from benchmarks._model_shapes import LAYERS
from rope_jax_kernels import Rotation, rotate, rotate_by_angles, rotate_qkv

# The compiler options of users, for tests that compare the bits of two programs: most programs of
# tests are compiled without the optimisations that contract products and sums (tests/conftest.py).
AS_USERS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_backend_extra_options": "",
}


def draw(seed, *shapes, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def pair_channels(pairs, pairing):
    """Channels of the first and of the second members of all pairs."""
    index = np.arange(pairs)
    return (index, pairs + index) if pairing == "half" else (2 * index, 2 * index + 1)


def turn(x, theta, pairing):
    """Turns x [B, L, N, D] by theta [N or 1, L, R] in float64, as complex numbers."""
    first, second = pair_channels(theta.shape[-1], pairing)
    out = np.array(x, np.float64)
    z = (out[..., first] + 1j * out[..., second]) * np.exp(
        1j * np.asarray(theta, np.float64)
    ).swapaxes(0, 1)
    out[..., first], out[..., second] = z.real, z.imag
    return out


def angles(coords, freqs):
    return np.einsum("la,nar->nlr", coords.astype(np.float64), freqs.astype(np.float64))


def to_layout(x, layout):
    return x if layout == "BLND" else x.swapaxes(1, 2)


def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


def assert_rounded_once(result, exact, pairs, pairing):
    """16-bit results are `exact` [..., D], cast once.

    To 1 ulp at the pair's norm for 99.9 % of the elements, and 2 for all.
    """
    result = np.asarray(result)
    first, second = pair_channels(pairs, pairing)
    norm = np.ones(exact.shape)
    norm[..., first] = norm[..., second] = np.hypot(exact[..., first], exact[..., second])
    unit = 2.0 ** np.floor(np.log2(norm)) * float(ml_dtypes.finfo(result.dtype).eps)
    units = np.abs(result.astype(np.float64) - exact.astype(result.dtype).astype(np.float64)) / unit
    assert units.max() <= 2
    assert np.mean(units <= 1) >= 0.999


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the rotary operations; the first `prefix` tokens have coordinates 0."""

    batch: int = 2
    tokens: int = 6
    heads: int = 3
    head_dim: int = 16
    pairs: int = 5
    axes: int = 2
    shared: bool = False
    pairing: str = "half"
    layout: str = "BLND"
    dtype: str = "float32"
    prefix: int = 0

    def __str__(self):
        changed = [
            f.name + "=" + str(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return ",".join(changed) or "default"

    def shape(self):
        """The shape of q, in the case's layout."""
        middle = (self.tokens, self.heads) if self.layout == "BLND" else (self.heads, self.tokens)
        return (self.batch, *middle, self.head_dim)

    def data(self, seed, count):
        """Arrays [B, L, N, D] in any layout, in the case's dtype."""
        return draw(
            seed,
            *[(self.batch, self.tokens, self.heads, self.head_dim)] * count,
            dtype=jnp.dtype(self.dtype),
        )

    def coords_and_freqs(self):
        """Angles up to a few turns."""
        coords, freqs = draw(
            1, (self.tokens, self.axes), (1 if self.shared else self.heads, self.axes, self.pairs)
        )
        coords *= 4
        coords[: self.prefix] = 0
        return coords, freqs


@st.composite
def any_case(draw, step=1, **options):
    """A case with multiples of `step` pairs and of `step` channels that do not turn."""
    number = lambda low, high: draw(st.integers(low, high))
    pairs = step * number(1, 20 // step)
    sizes = {
        "batch": number(1, 6),
        "tokens": number(1, 70),
        "heads": number(1, 5),
        "head_dim": 2 * pairs + step * number(0, 12 // step),
        "pairs": pairs,
        "axes": number(1, 3),
        "shared": draw(st.booleans()),
        "pairing": draw(st.sampled_from(["half", "interleaved"])),
        "layout": draw(st.sampled_from(["BLND", "BNLD"])),
    }
    return Case(**sizes | options)


# Small enough to interpret.
CASES = [
    Case(),
    Case(
        heads=2,
        head_dim=32,
        pairs=8,
        shared=True,
        pairing="interleaved",
        layout="BNLD",
        dtype="bfloat16",
    ),
    Case(tokens=49, heads=2, head_dim=32, pairs=8, dtype="float16"),
    Case(
        batch=1,
        tokens=197,
        heads=1,
        head_dim=64,
        pairs=32,
        pairing="interleaved",
        dtype="bfloat16",
        prefix=1,
    ),
    Case(batch=3, tokens=1, head_dim=8, pairs=1, axes=1, layout="BNLD"),
    Case(batch=1, tokens=3, heads=1, head_dim=256, pairs=128, axes=3, shared=True),
    Case(
        batch=5,
        tokens=13,
        heads=5,
        head_dim=24,
        pairs=12,
        layout="BNLD",
        dtype="bfloat16",
        prefix=2,
    ),
    Case(head_dim=10, pairs=3, pairing="interleaved", dtype="float16"),
    Case(batch=1, tokens=197, heads=2, head_dim=64, pairs=16, axes=3, dtype="bfloat16", prefix=1),
    Case(batch=3, tokens=5, heads=2, head_dim=32, pairs=16, shared=True, layout="BNLD"),
]


def layer_case(name, batch, **options):
    """The case of a model's layer."""
    layer = LAYERS[name]
    sizes = {"heads": layer.heads, "head_dim": layer.head_dim, "pairs": layer.pairs}
    return Case(**{"batch": batch, "tokens": layer.tokens, "dtype": "bfloat16"} | sizes | options)


# Layers of models, and shapes that divide nothing. For a GPU, real or compiled for.
MODEL_CASES = [
    layer_case("vit_s_12_heads", 128),
    layer_case("vit_s_class_token", 64, pairs=32, pairing="interleaved", prefix=1),
    Case(batch=512, tokens=49, heads=3, head_dim=32, pairs=8, layout="BNLD", dtype="float16"),
    Case(batch=8, tokens=3136, heads=3, head_dim=64, pairs=16, dtype="float32"),
    Case(
        batch=16,
        tokens=197,
        heads=6,
        head_dim=96,
        pairs=24,
        axes=3,
        shared=True,
        dtype="bfloat16",
        prefix=1,
    ),
    Case(
        batch=4,
        tokens=64,
        heads=8,
        head_dim=128,
        pairs=4,
        shared=True,
        layout="BNLD",
        dtype="bfloat16",
    ),
    layer_case("vit_s_rope_mixed", 16, layout="BNLD", dtype="float32"),
    Case(batch=32, tokens=784, heads=4, head_dim=128, pairs=32, dtype="float16"),
]


def serves(implementation, case):
    """True if an implementation serves a case; "mosaic" needs sizes of its copy engine."""
    itemsize = jnp.dtype(case.dtype).itemsize
    halves = case.head_dim > 2 * case.pairs or case.pairs * itemsize % 16 == 0
    fits = (
        case.pairing == "half"
        and case.pairs % 4 == 0
        and case.pairs <= 128
        and case.head_dim * itemsize % 16 == 0
        and halves
    )
    return implementation != "mosaic" or fits


def run(case, implementation, q, k, coords, freqs):
    """rotate() of arrays in [B, L, N, D], back in [B, L, N, D]."""
    rotation = Rotation(coords, freqs, case.pairing)
    out = rotate(
        *(to_layout(x, case.layout) for x in (q, k)),
        rotation,
        layout=case.layout,
        implementation=implementation,
    )
    return tuple(to_layout(x, case.layout) for x in out)


def check_forward(case, implementation):
    """Checks values, rounding, untouched channels and tokens, and that NaN stays in place."""
    q, k = case.data(0, 2)
    coords, freqs = case.coords_and_freqs()
    f = jax.jit(lambda *args: run(case, implementation, *args))
    out = f(q, k, coords, freqs)
    theta = angles(coords, freqs)
    plain = (None, None)
    if case.dtype == "float32":
        plain = jax.jit(lambda *args: run(case, "xla", *args))(q, k, coords, freqs)
    for x, y, reference in zip((q, k), out, plain, strict=True):
        assert y.dtype == case.dtype
        assert np.array_equal(bits(y)[..., 2 * case.pairs :], bits(x)[..., 2 * case.pairs :])
        assert np.array_equal(bits(y)[:, : case.prefix], bits(x)[:, : case.prefix])
        exact = turn(x, theta, case.pairing)
        if reference is None:
            assert_rounded_once(y, exact, case.pairs, case.pairing)
        else:
            # Sines of kernels may be off by 2e-7, at the length of a pair.
            pairs = (x[..., c] for c in pair_channels(case.pairs, case.pairing))
            floor = 2e-7 * np.hypot(*pairs).max()
            assert np.abs(y - exact).max() <= 2 * np.abs(reference - exact).max() + floor

    # NaN in the last of several batch items, and in all others in the last head's last token and in
    # every channel that does not turn.
    clean = np.ones(q.shape, bool)
    clean[1:][-1:], clean[:, -1, -1], clean[..., 2 * case.pairs :] = False, False, False
    spoiled = (np.where(clean, x, np.nan).astype(x.dtype) for x in (q, k))
    for x, poisoned in zip(out, f(*spoiled, coords, freqs), strict=True):
        assert np.array_equal(bits(poisoned)[clean], bits(x)[clean])
        assert np.isnan(np.asarray(poisoned, np.float32)[~clean]).all()


def check_packed(case, implementation):
    """Checks that rotate_qkv equals rotate on the parts, bit for bit by kernels, and keeps v.

    XLA may contract products with sums in one program and not in the other, which can round a
    result to its neighbour.
    """
    q, k, v = case.data(2, 3)
    coords, freqs = case.coords_and_freqs()
    compiled = functools.partial(jax.jit, compiler_options=AS_USERS)
    out = compiled(lambda *args: run(case, implementation, *args))(q, k, coords, freqs)
    f = compiled(
        lambda x, coords, freqs: rotate_qkv(
            x, Rotation(coords, freqs, case.pairing), implementation=implementation
        )
    )
    packed = f(np.stack([q, k, v], axis=2), coords, freqs)
    assert np.array_equal(bits(packed)[:, :, 2], bits(v))
    for i, x in enumerate(out):
        if implementation == "xla":
            eps = float(jnp.finfo(x.dtype).eps)
            pair = (np.asarray(y, np.float32) for y in (packed[:, :, i], x))
            np.testing.assert_allclose(*pair, rtol=eps, atol=1e-6)
        else:
            assert np.array_equal(bits(packed)[:, :, i], bits(x))


def assert_turned(result, exact, case):
    """Checks that the result is `exact`, up to the rounding of the case's dtype."""
    if case.dtype == "float32":
        np.testing.assert_allclose(result, exact, rtol=1e-5, atol=5e-6)
    else:
        assert_rounded_once(result, exact, case.pairs, case.pairing)


def check_by_angles(case, implementation, theta_dtype):
    """Checks values of rotate_by_angles, and gradients of data and theta."""
    x, g = case.data(3, 2)
    theta = angles(*case.coords_and_freqs()).astype(jnp.dtype(theta_dtype))
    kwargs = {"pairing": case.pairing, "layout": case.layout, "implementation": implementation}
    f = jax.jit(
        lambda x, theta: to_layout(
            rotate_by_angles(to_layout(x, case.layout), theta, **kwargs), case.layout
        )
    )
    gradients = jax.jit(lambda x, theta, g: jax.vjp(f, x, theta)[1](g))
    dx, dtheta = gradients(x, theta, g)
    wide = theta.astype(np.float64)
    for y, source, sign in ((f(x, theta), x, 1), (dx, g, -1)):
        assert_turned(y, turn(source, sign * wide, case.pairing), case)
    exact = theta_gradient(case, x, g, wide)
    exact = exact.sum(0, keepdims=True) if case.shared else exact
    tolerance = max(3e-6, float(ml_dtypes.finfo(theta.dtype).eps))
    np.testing.assert_allclose(
        np.asarray(dtheta, np.float64), exact, rtol=tolerance, atol=tolerance * np.abs(exact).max()
    )


def theta_gradient(case, x, g, theta):
    """[N, L, R]: with y = (a', b'), dL/dtheta = g_b' a' - g_a' b', summed over the batch."""
    first, second = pair_channels(case.pairs, case.pairing)
    y, g = turn(x, theta, case.pairing), g.astype(np.float64)
    return (g[..., second] * y[..., first] - g[..., first] * y[..., second]).sum(0).swapaxes(0, 1)


def exact_gradients(case, cotangents, q, k, coords, freqs):
    """Gradients of q, k, coords and freqs, in float64."""
    theta = angles(coords, freqs)
    parts = zip((q, k), cotangents, strict=True)
    dtheta = sum(theta_gradient(case, x, g, theta) for x, g in parts)
    by_head = np.einsum("la,nlr->nar", coords, dtheta)
    return (
        *(turn(g, -theta, case.pairing) for g in cotangents),
        np.einsum("nlr,nar->la", dtheta, np.broadcast_to(freqs, by_head.shape)),
        by_head.sum(0, keepdims=True) if case.shared else by_head,
    )


def assert_as_exact_as(results, plain, exact):
    """Checks that errors are at most twice those of "xla" in the same precision."""
    for x, reference, true in zip(results, plain, exact, strict=True):
        assert (x.shape, x.dtype) == (reference.shape, reference.dtype)
        x, reference = (np.asarray(a, np.float64) for a in (x, reference))
        # The floor keeps a case from failing where plain jnp happens to be exact.
        floor = 1e-6 * np.abs(true).max()
        assert np.abs(x - true).max() <= 2 * np.abs(reference - true).max() + floor


def check_gradients(case, implementation):
    """Checks gradients of q, k, coords and freqs by float64 and "xla" in the same precision."""
    q, k, gq, gk = case.data(4, 4)
    coords, freqs = case.coords_and_freqs()
    gradients = lambda implementation: jax.jit(
        lambda gs, *args: jax.vjp(lambda *args: run(case, implementation, *args), *args)[1](gs)
    )
    args = (gq, gk), q, k, coords, freqs
    result, plain = (gradients(name)(*args) for name in (implementation, "xla"))
    assert_as_exact_as(result, plain, exact_gradients(case, *args))
