"""Calls on meshes with Explicit axes, where the types of arrays have their shardings."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rope_jax_kernels import (
    Global,
    Neighborhood,
    Rotation,
    Window,
    attention,
    attention_qkv,
    rotate,
    rotate_by_angles,
    rotate_qkv,
)
from tests.devices import run_on_devices

N, D = 2, 16
PATTERNS = {
    "global": (Global(), (16,), (N, 16, 16)),
    "window": (Window((4, 4), (2, 2)), (6, 6), (N, 49)),
    "neighborhood": (Neighborhood((3, 3)), (4, 4), (N, 5, 5)),
    "dilated": (Neighborhood((3, 3), (2, 2)), (4, 4), (N, 5, 5)),
}


def replicate(*shape):
    return shape, P(*(None for _ in shape))


def shard_batch(*places):
    return (4, *places, N, D), P("data", *(None for _ in places), "heads", None)


COORDS = replicate(16, 2)
ROTATION = COORDS, replicate(N, 2, 8)
# Name -> a function of an implementation and arrays, and the arrays' shapes and shardings.
CASES = {
    "rotate": (
        lambda by, q, k, *r: rotate(q, k, Rotation(*r), implementation=by),
        [shard_batch(16), ((4, 16, 1, D), P("data", None, None, None)), COORDS, replicate(1, 2, 8)],
    ),
    "rotate_by_angles": (
        lambda by, x, theta: rotate_by_angles(x, theta, implementation=by),
        [shard_batch(16), replicate(N, 16, 8)],
    ),
    "rotate_qkv": (
        lambda by, qkv, *r: rotate_qkv(qkv, Rotation(*r), implementation=by),
        [shard_batch(16, 3), *ROTATION],
    ),
}
for name, (pattern, places, bias) in PATTERNS.items():

    def attend_parts(by, q, k, v, bias, *r, pattern=pattern):
        terms = {"rotation": Rotation(*r), "bias": bias, "implementation": by}
        return attention(q, k, v, pattern=pattern, **terms)

    def attend_qkv(by, qkv, *r, pattern=pattern):
        return attention_qkv(qkv, pattern=pattern, rotation=Rotation(*r), implementation=by)

    terms = [replicate(*bias), *ROTATION]
    CASES[f"attention-{name}"] = (attend_parts, [shard_batch(*places)] * 3 + terms)
    CASES[f"attention_qkv-{name}"] = (attend_qkv, [shard_batch(*places, 3), *ROTATION])


def differentiable(name, by=None):
    """A function of a case's results and gradients, except of coordinates, which kernels lack."""
    call, operands = CASES[name]
    argnums = [number for number, operand in enumerate(operands) if operand is not COORDS]

    def loss(*arrays):
        results = call(by, *arrays)
        return sum((x**3).sum() for x in jax.tree.leaves(results)), results

    return jax.grad(loss, argnums=argnums, has_aux=True)


@pytest.mark.parametrize("by", ["xla", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_sharded_like_the_arrays(name, by, monkeypatch):
    monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")
    mesh = AbstractMesh((2, 2), ("data", "heads"), axis_types=(AxisType.Explicit,) * 2)
    arrays = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in CASES[name][1]
    ]
    with jax.sharding.use_abstract_mesh(mesh):
        gradients, results = jax.eval_shape(differentiable(name, by), *arrays)
    by_shape = {array.shape: array.sharding for array in arrays}
    assert all(gradient.sharding == by_shape[gradient.shape] for gradient in gradients)
    for result, array in zip(jax.tree.leaves(results), arrays, strict=False):
        ends = [(*x.sharding.spec[:2], *x.sharding.spec[-2:]) for x in (result, array)]
        assert ends[0] == ends[1]


VALUES = """
import jax, numpy as np
from jax.sharding import NamedSharding
from tests.kernels.test_calls import CASES, differentiable
mesh, rng = jax.make_mesh((2, 2), ("data", "heads")), np.random.default_rng(0)
for name in ("rotate", "rotate_qkv", "attention-window", "attention_qkv-dilated"):
    operands = CASES[name][1]
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape, _ in operands]
    put = [jax.device_put(x, NamedSharding(mesh, y[1])) for x, y in zip(arrays, operands)]
    one, many = (jax.jit(differentiable(name))(*x) for x in (arrays, put))
    for x, y in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4, err_msg=name)
"""


@pytest.mark.process
def test_values_match_one_device():
    run_on_devices(4, VALUES)
