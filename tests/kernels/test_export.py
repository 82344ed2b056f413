"""Programs with the "xla" implementation are exported to bytes and give the same results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax_kernels import Rotation, device, rotate, rotate_by_angles, rotate_qkv
from tests.kernels.covering import covering
from tests.kernels.rotary_cases import draw

pytest.importorskip(
    "flatbuffers", reason="jax.export needs flatbuffers to write a program as bytes"
)


def call(name, pairing, x, coords, freqs):
    if name == "rotate":
        return rotate(
            x[:, :, 0], x[:, :, 1], Rotation(coords, freqs, pairing), implementation="xla"
        )
    if name == "rotate_qkv":
        return rotate_qkv(x, Rotation(coords, freqs, pairing), implementation="xla")
    return rotate_by_angles(
        x[:, :, 0], Rotation(coords, freqs).angles(), pairing=pairing, implementation="xla"
    )


@pytest.mark.parametrize("dtype", covering(["float32", "bfloat16"], ["float32"]))
@pytest.mark.parametrize(
    ("name", "pairing"),
    [("rotate", "half"), ("rotate_qkv", "interleaved"), ("rotate_by_angles", "half")],
)
def test_round_trip(name, pairing, dtype):
    qkv, coords, freqs = map(jnp.asarray, draw(0, (2, 6, 3, 3, 16), (6, 2), (3, 2, 5)))
    qkv = qkv.astype(dtype)
    f = jax.jit(functools.partial(call, name, pairing))
    program = jax.export.export(f, platforms=["cpu", "cuda"])(qkv, coords, freqs)
    exported = jax.export.deserialize(program.serialize())
    assert exported.platforms == ("cpu", "cuda")
    for x, expected in zip(
        jax.tree.leaves(exported.call(qkv, coords, freqs)),
        jax.tree.leaves(f(qkv, coords, freqs)),
        strict=True,
    ):
        assert x.dtype == dtype
        np.testing.assert_array_equal(np.float32(x), np.float32(expected))


@pytest.mark.slow
def test_with_gradients_and_any_batch():
    """The gradient travels along, and the batch may be left open."""
    qkv, coords, freqs = map(jnp.asarray, draw(1, (2, 6, 3, 3, 16), (6, 2), (3, 2, 5)))
    f = jax.jit(functools.partial(call, "rotate_qkv", "half"))
    (batch,) = jax.export.symbolic_shape("b")
    shapes = [
        jax.ShapeDtypeStruct((batch, *qkv.shape[1:]), qkv.dtype),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (coords, freqs)),
    ]
    exported = jax.export.deserialize(jax.export.export(f)(*shapes).serialize(vjp_order=1))
    loss = lambda f: lambda *args: jnp.sum(jnp.sin(f(*args)))
    for x, expected in zip(
        jax.grad(loss(exported.call), (0, 1, 2))(qkv, coords, freqs),
        jax.grad(loss(f), (0, 1, 2))(qkv, coords, freqs),
        strict=True,
    ):
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-5)


def test_beside_a_gpu_the_default_is_exported_for_a_cpu(monkeypatch):
    """Without the kernel. For several platforms at once jax 0.11.2 lowers Pallas for each."""
    monkeypatch.setattr(device, "bandwidth", lambda: 0.0)
    qkv, coords, freqs = map(jnp.asarray, draw(2, (2, 6, 3, 3, 64), (6, 2), (3, 2, 16)))
    default = jax.jit(lambda x, *angles: rotate(x[:, :, 0], x[:, :, 1], Rotation(*angles)))
    gpu = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("d",), abstract_device=gpu)
    with jax.sharding.use_abstract_mesh(mesh):
        assert "pallas_call" in str(jax.make_jaxpr(default)(qkv, coords, freqs))
        exported = jax.export.export(default, platforms=["cpu"])(qkv, coords, freqs)
    expected = jax.jit(functools.partial(call, "rotate", "half"))(qkv, coords, freqs)
    for x, y in zip(exported.call(qkv, coords, freqs), expected, strict=True):
        np.testing.assert_array_equal(x, y)
