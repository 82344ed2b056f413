"""Which implementation serves a call, with fake implementations and abstract devices."""

import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import rope_jax_kernels
from rope_jax_kernels import (
    Global,
    Neighborhood,
    Rotation,
    Window,
    attention,
    attention_qkv,
    dispatch,
    explain,
    rotate,
    rotate_by_angles,
    rotate_qkv,
)
from rope_jax_kernels.rotary import rotate_back_and_pack, unpack_and_rotate

X = jnp.ones((2, 6, 3, 64), jnp.bfloat16)
QKV = jnp.stack([X, X, X], axis=2)
SOME, ALL = (Rotation(jnp.ones((6, 2)), jnp.ones((3, 2, r))) for r in (16, 32))
CALLS = [
    (rotate, (X, X, SOME), {}),
    (rotate_qkv, (QKV, SOME), {"implementation": "xla"}),
    (rotate_by_angles, (X, jnp.ones((3, 6, 16))), {"layout": "BLND"}),
    (unpack_and_rotate, (QKV, SOME), {}),
    (rotate_back_and_pack, (X, X, X, SOME), {}),
    (attention, (X, X, X), {"pattern": Global()}),
    (attention_qkv, (QKV,), {"pattern": Global(), "rotation": SOME}),
]


def h200(devices=1):
    gpu = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    return jax.sharding.AbstractMesh((devices,), ("d",), abstract_device=gpu)


@pytest.fixture
def fakes(monkeypatch):
    """Three fake implementations of attention; returns which were asked and which computed."""
    asked, used = [], []
    names = {"xla": None, "first": "it is the first", "second": None}
    for name, reason in names.items():
        module = types.ModuleType(f"rope_jax_kernels.{name}")
        module.refusal = lambda name=name, reason=reason, **_: (asked.append(name), reason)[1]
        module.attention = lambda name=name, **arguments: (used.append(name), arguments["q"])[1]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "attention", {name: name for name in names})
    monkeypatch.setitem(dispatch.PREFERENCE, "cpu", {"attention": ("first", "second")})
    return asked, used


def attend(**options):
    return attention(X, X, X, pattern=Global(), **options)


def test_each_implementation_is_asked_once_until_one_serves(fakes):
    attend()
    assert fakes == (["first", "second"], ["second"])


def test_a_named_implementation_is_asked_alone(fakes):
    attend(implementation="second")
    attend(implementation="xla")
    assert fakes == (["second"], ["second", "xla"])
    with pytest.raises(
        ValueError,
        match="'first' cannot serve this call of attention: it is the first; use None or 'xla'",
    ):
        attend(implementation="first")


def test_an_unknown_name_is_answered_with_the_names(fakes):
    with pytest.raises(
        ValueError,
        match=r"'cuda' is not one that attention has; use None or one of \['first', 'second',",
    ):
        attend(implementation="cuda")


def test_what_this_jax_does_not_have_is_refused(fakes, monkeypatch):
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS["attention"], "first", "no_such_module")
    assert "does not have what it needs" in explain(attention, X, X, X, pattern=Global())["first"]
    attend()
    assert fakes[1] == ["second"]


def test_xla_is_the_default_on_a_cpu(monkeypatch):
    monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")
    assert {dispatch.candidates(op) for op in dispatch.IMPLEMENTATIONS} == {("xla",)}


@pytest.mark.parametrize(
    ("f", "shape", "kernel"),
    [
        (lambda q: rotate(q, q, SOME), X, True),
        (lambda q: rotate(q, q, ALL), X, False),  # a kernel would move the bytes of a copy
        (lambda q: rotate_by_angles(q, jnp.ones((3, 6, 16))), X, True),
        (lambda qkv: rotate_qkv(qkv, SOME), QKV, False),
        (lambda qkv: unpack_and_rotate(qkv, ALL), QKV, True),
        (lambda x: rotate_back_and_pack(x, x, x, SOME), X, False),
        (lambda x: attention(x, x, x, pattern=Global()), X, True),
        (lambda qkv: attention_qkv(qkv, pattern=Global(), rotation=ALL), QKV, True),
        (lambda x: attention(x, x, x, pattern=Window((2, 2))), X[None], True),
        (lambda x: attention(x, x, x, pattern=Neighborhood((1, 17))), X[None], False),
    ],
)
def test_none_on_a_gpu(f, shape, kernel):
    with jax.sharding.use_abstract_mesh(h200()):
        assert ("pallas_call" in str(jax.make_jaxpr(f)(shape))) == kernel
    with jax.sharding.use_abstract_mesh(h200(8)):  # XLA would gather a kernel's operands
        assert "pallas_call" not in str(jax.make_jaxpr(f)(shape))


@pytest.mark.parametrize(("op", "args", "kwargs"), CALLS, ids=lambda x: getattr(x, "__name__", ""))
def test_explain_lists_every_implementation(op, args, kwargs):
    reasons = explain(op, *args, **kwargs)
    assert list(reasons) == list(dispatch.IMPLEMENTATIONS[op.__name__])
    assert reasons.pop("xla") == "ok"
    assert all("GPU" in reason for reason in reasons.values())


def test_explain_refuses_what_is_no_operation():
    namesake = types.FunctionType((lambda x: x).__code__, {}, "rotate")
    for op in (jnp.sum, namesake):
        with pytest.raises(
            ValueError, match=r"is not an operation of rope_jax_kernels; use one of \['rotate'"
        ):
            explain(op, X)
    with pytest.raises(TypeError, match="pattern"):
        explain(attention, X, X, X)
    assert {op.__name__ for op, *_ in CALLS} == set(dispatch.IMPLEMENTATIONS)
    assert set(rope_jax_kernels.__all__) >= {"rotate", "attention", "explain"}


@pytest.mark.process
def test_a_cpu_program_imports_no_pallas():
    program = (
        "import sys, jax.numpy as jnp\n"
        "from rope_jax_kernels import Global, Rotation, attention, rotate\n"
        "x, rotation = jnp.ones((1, 2, 1, 4)), Rotation(jnp.ones((2, 1)), jnp.ones((1, 1, 2)))\n"
        "attention(*rotate(x, x, rotation), x, pattern=Global())\n"
        "sys.exit(any('pallas' in name for name in sys.modules))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
