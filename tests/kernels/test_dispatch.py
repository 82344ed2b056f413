"""The choice of an implementation, with fake implementations and abstract devices."""

import dataclasses
import functools
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._model_shapes import LAYERS
from rope_jax_kernels import (
    Global,
    Neighborhood,
    Rotation,
    Window,
    attention,
    attention_qkv,
    device,
    dispatch,
    explain,
    rotate,
    rotate_by_angles,
    rotate_qkv,
)
from rope_jax_kernels.attention import cudnn
from rope_jax_kernels.rotary import unpack_and_rotate
from tests.aot.layers import train
from tests.slow import some_slow

X = jnp.ones((2, 6, 3, 64), jnp.bfloat16)
MANY = jax.ShapeDtypeStruct((2**15, 6, 3, 64), jnp.bfloat16)
QKV = jnp.stack([X, X, X], axis=2)
SOME, ALL = (Rotation(jnp.ones((6, 2)), jnp.ones((3, 2, r))) for r in (16, 32))
CALLS = [
    (rotate, (X, X, SOME), {}),
    (rotate_qkv, (QKV, SOME), {"implementation": "xla"}),
    (rotate_by_angles, (X, jnp.ones((3, 6, 16))), {"layout": "BLND"}),
    (unpack_and_rotate, (QKV, SOME), {}),
    (attention, (X, X, X), {"pattern": Global()}),
    (attention_qkv, (QKV,), {"pattern": Global(), "rotation": SOME}),
]


def abstract_mesh(kind="NVIDIA H200", devices=1):
    platform = "cpu" if kind == "cpu" else "gpu"
    device = jax.sharding.AbstractDevice(kind, 1 if kind == "cpu" else 132, platform)
    return jax.sharding.AbstractMesh((devices,), ("d",), abstract_device=device)


@pytest.fixture
def with_cudnn(monkeypatch):
    """Simulates that jax's CUDA plugin is installed."""
    monkeypatch.setattr(cudnn, "missing", lambda: None)


@pytest.fixture
def without_cudnn(monkeypatch):
    """Simulates that jax's CUDA plugin is not installed."""
    monkeypatch.setattr(cudnn, "missing", lambda: "cuDNN is not detected.")


@pytest.fixture
def default_gpu(monkeypatch):
    """Simulates an H200 as jax's default device; arrays, all large, are on the CPU."""
    monkeypatch.setattr(device, "target", lambda: abstract_mesh().abstract_device)
    monkeypatch.setattr(device, "bandwidth", lambda: 0.0)


def test_a_named_kernel_that_refuses_raises(monkeypatch):
    monkeypatch.delenv("ROPE_JAX_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"'triton' cannot serve .*GPU.*; use None or 'xla'"):
        attention(X, X, X, pattern=Global(), implementation="triton")
    with pytest.raises(ValueError, match=r"'cuda' is not one that attention has.*'xla'"):
        attention(X, X, X, pattern=Global(), implementation="cuda")


def test_xla_is_the_default_on_a_cpu(monkeypatch):
    monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")
    assert {dispatch.candidates(op) for op in dispatch.IMPLEMENTATIONS} == {("xla",)}


@pytest.mark.parametrize(
    ("f", "shape", "kernel"),
    [
        (lambda q: rotate(q, q, SOME), MANY, True),
        (lambda q: rotate(q, q, SOME), X, False),  # takes less time than a launch
        (lambda q: rotate(q, q, ALL), MANY, False),  # a kernel would move the bytes of a copy
        (lambda q: rotate_by_angles(q, jnp.ones((3, 6, 16))), MANY, True),
        (lambda qkv: rotate_qkv(qkv, SOME), QKV, False),
        (lambda qkv: unpack_and_rotate(qkv, ALL), QKV, True),
        (lambda x: attention(x, x, x, pattern=Global()), X, True),
        (lambda qkv: attention_qkv(qkv, pattern=Global(), rotation=ALL), QKV, True),
        (lambda x: attention(x, x, x, pattern=Window((2, 2))), X[None], True),
        (lambda x: attention(x, x, x, pattern=Neighborhood((1, 17))), X[None], False),
    ],
)
def test_the_default_on_a_gpu(f, shape, kernel, without_cudnn):
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        assert ("pallas_call" in str(jax.make_jaxpr(f)(shape))) == kernel
    with jax.sharding.use_abstract_mesh(
        abstract_mesh(devices=8)
    ):  # XLA would gather a kernel's operands
        assert "pallas_call" not in str(jax.make_jaxpr(f)(shape))


# Kind of device -> implementation by None in 16 bits, of `Global`, `Window` and `Neighborhood`; and
# in float32.
CHOICES = {
    "NVIDIA H200": ("cudnn", "mosaic", "mosaic", "triton"),
    "NVIDIA H100 80GB HBM3": ("cudnn", "mosaic", "mosaic", "triton"),
    "NVIDIA A100-SXM4-80GB": ("cudnn", "xla", "xla", "xla"),
    "NVIDIA L4": ("cudnn", "xla", "xla", "xla"),
    "NVIDIA B200": ("cudnn", "xla", "mosaic", "xla"),
    "NVIDIA GeForce RTX 5090": ("cudnn", "xla", "xla", "xla"),
    "Tesla T4": ("xla", "xla", "xla", "xla"),
    "gfx942": ("xla", "xla", "xla", "xla"),
    "cpu": ("xla", "xla", "xla", "xla"),
}


@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_choices_for_layers_of_models(kind, dtype, with_cudnn):
    *in_16_bits, otherwise = CHOICES[kind]
    patterns = Global, Window, Neighborhood
    by_pattern = {} if dtype == "float32" else dict(zip(patterns, in_16_bits, strict=True))
    for name, layer in LAYERS.items():
        is_global = isinstance(layer.pattern, Global)
        for devices in (1, 8):
            expected = by_pattern.get(type(layer.pattern), otherwise)
            with jax.sharding.use_abstract_mesh(abstract_mesh(kind, devices)):
                choice, reasons = choose(layer, dtype)
            if devices > 1 and expected in ("triton", "mosaic"):
                expected = "xla"
            assert choice == expected, (name, devices)
            assert reasons[choice] == "ok"
            generation = kind not in ("Tesla T4", "gfx942", "cpu")
            in_mosaic = "H200" in kind or "H100" in kind or ("B200" in kind and "nat" in name)
            assert (reasons["mosaic"] == "ok") == (in_mosaic and dtype != "float32")
            assert (reasons["triton"] == "ok") == generation
            assert (reasons["cudnn"] == "ok") == (
                generation and is_global and dtype != "float32"
            ), reasons["cudnn"]


def test_unlisted_gpus_are_refused_ahead_of_time(without_cudnn):
    """Its default would be `xla`, whatever the GPU could do."""
    with jax.sharding.use_abstract_mesh(abstract_mesh("NVIDIA GeForce RTX 9999")):
        with pytest.raises(ValueError, match=r"'NVIDIA GeForce RTX 9999' is not .* H200, .* 5090"):
            choose(LAYERS["vit_s"], "bfloat16")
        named = lambda x: attention(x, x, x, pattern=Global(), implementation="xla")
        jax.eval_shape(named, X)


def choose(layer, dtype, sharding=None):
    """The choice for a layer, and the result of `explain`."""
    results = []

    def look(qkv, coords, freqs, bias, _):
        terms = {"pattern": layer.pattern, "rotation": Rotation(coords, freqs), "scale": None}
        terms |= {"bias": bias if layer.bias else None}
        results.append(dispatch.resolve("attention_qkv", {"qkv": qkv} | terms))
        results.append(explain(attention_qkv, qkv, **terms))

    qkv, *rest = layer.shapes(128, dtype).values()
    qkv = jax.ShapeDtypeStruct(qkv.shape, qkv.dtype, sharding=sharding)
    jax.eval_shape(look, qkv, *rest)
    return results


def test_the_next_best_serves_without_cudnn(without_cudnn):
    for kind, expected in (("NVIDIA H200", "triton"), ("NVIDIA A100", "xla")):
        with jax.sharding.use_abstract_mesh(abstract_mesh(kind)):
            choice, reasons = choose(LAYERS["vit_s"], "bfloat16")
        assert (choice, reasons["cudnn"]) == (expected, "cuDNN is not detected.")


def test_cudnn_serves_explicit_shardings(with_cudnn):
    mesh = abstract_mesh(devices=8).update(axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec("d")
    with jax.sharding.use_abstract_mesh(mesh):
        choice, reasons = choose(
            LAYERS["vit_s"], "bfloat16", jax.sharding.NamedSharding(mesh, spec)
        )
    assert (choice, reasons["cudnn"]) == ("cudnn", "ok")


@pytest.mark.parametrize(
    ("window", "name"),
    [
        (Window((5, 6)), "triton"),
        (Window((5, 7)), "mosaic"),
        (Window((8, 8), (4, 4)), "mosaic"),
        (Window((8, 8), (1, 1)), "triton"),
    ],
)
def test_windows_that_leave_slots_empty(window, name):
    """Mosaic GPU's tiles have 64 slots, and a window's boxes begin at every eighth."""
    layer = dataclasses.replace(LAYERS["swin_t_1"], pattern=window)
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        choice, reasons = choose(layer, "bfloat16")
    assert (choice, reasons["mosaic"]) == (name, "ok")


MAP = jnp.linspace(-1, 1, 2 * 4 * 4 * 3 * 2 * 16).reshape(2, 4, 4, 3, 2, 16)


@pytest.mark.parametrize(
    ("kind", "batch", "kernel"),
    [
        ("NVIDIA H200", 128, False),  # 38.5 MB, and 48 MB pass in 10 us
        ("NVIDIA H200", 256, True),
        ("NVIDIA L4", 16, True),
        ("NVIDIA L4", 8, False),
        ("Tesla T4", 256, False),
    ],
)
def test_rotation_in_place_starts_at_ten_microseconds(kind, batch, kernel):
    x = jax.ShapeDtypeStruct((batch, 196, 6, 64), jnp.bfloat16)
    rotation = Rotation(jnp.ones((196, 2)), jnp.ones((6, 2, 16)))
    with jax.sharding.use_abstract_mesh(abstract_mesh(kind)):
        text = str(jax.make_jaxpr(lambda q, k: rotate(q, k, rotation))(x, x))
    assert ("pallas_call" in text) == kernel


def attend_map(implementation, qkv, freqs, table):
    rotation = Rotation(jnp.arange(32.0).reshape(16, 2), freqs)
    terms = {"rotation": rotation, "bias": table, "implementation": implementation}
    return attention_qkv(qkv, pattern=Neighborhood((3, 3)), **terms)


FREQS_AND_TABLE = (jnp.linspace(0.1, 1, 2 * 2 * 4).reshape(2, 2, 4), jnp.ones((2, 5, 5)))


def map_examples(transform):
    """Applies f to the examples of its second argument one by one."""
    return lambda f: lambda by, qkv, *rest: transform(lambda x: f(by, x[None], *rest)[0])(qkv)


ATTENTION = (MAP, *FREQS_AND_TABLE)
ANGLES = jnp.ones((1, 6, 16))
# Functions of an implementation and operands, and the operands.
CPU_CASES = {
    "attention": (attend_map, ATTENTION),
    "vmap": (map_examples(jax.vmap)(attend_map), ATTENTION),
    "checkpoint": (jax.checkpoint(attend_map, static_argnums=0), ATTENTION),
    "scan": (map_examples(lambda f: functools.partial(jax.lax.map, f))(attend_map), ATTENTION),
    "rotate": (lambda by, x: rotate(x, x, SOME, implementation=by), (X,)),
    "rotate_by_angles": (lambda by, x: rotate_by_angles(x, ANGLES, implementation=by), (X,)),
    "unpack_and_rotate": (lambda by, x: unpack_and_rotate(x, SOME, implementation=by), (QKV,)),
}


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", some_slow(CPU_CASES, ["attention", "rotate", "unpack_and_rotate"]))
def test_arrays_on_the_cpu_beside_a_gpu(name, eager, default_gpu):
    """Values and gradients are those of "xla"; the kernel is not lowered."""
    f, operands = CPU_CASES[name]

    def gradients(by, *operands):
        loss = lambda *x: sum(jnp.sum(y**2) for y in jax.tree.leaves(f(by, *x)))
        return jax.value_and_grad(loss, tuple(range(len(operands))))(*operands)

    assert "pallas_call" in str(jax.make_jaxpr(functools.partial(gradients, None))(*operands))
    compiled = jax.jit(gradients, static_argnums=0)
    results = (gradients if eager else compiled)(None, *operands)
    expected = jax.tree.leaves(compiled("xla", *operands))
    for x, y in zip(jax.tree.leaves(results), expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=2e-5, atol=1e-5)


def test_the_default_is_exported_for_a_cpu(monkeypatch):
    """The kernel is absent. For several platforms at once jax 0.11.2 lowers Pallas for each."""
    monkeypatch.setattr(device, "bandwidth", lambda: 0.0)
    default = jax.jit(lambda q: rotate(q, q, SOME))
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        assert "pallas_call" in str(jax.make_jaxpr(default)(X))
        exported = jax.export.export(default, platforms=["cpu"])(X)
    for x, y in zip(exported.call(X), default(X), strict=True):
        assert jnp.array_equal(x, y)


def test_sizes_of_exported_programs_may_be_open():
    batch, tokens = jax.export.symbolic_shape("b, l")
    shapes = [(batch, *X.shape[1:]), (2, tokens, 2, 8)]
    turn, attend = lambda x: rotate(x, x, SOME), lambda x: attention(x, x, x, pattern=Global())
    for function, shape in zip((turn, attend), shapes, strict=True):
        exported = jax.export.export(jax.jit(function))(jax.ShapeDtypeStruct(shape, jnp.float32))
        x = jnp.ones([n if isinstance(n, int) else 3 for n in shape])
        results = zip(*map(jax.tree.leaves, (exported.call(x), function(x))), strict=True)
        for result, expected in results:
            np.testing.assert_allclose(result, expected, atol=1e-6)


def test_a_named_kernel_is_not_replaced_on_the_cpu(default_gpu):
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        jax.jit(functools.partial(attend_map, "triton"))(MAP, *FREQS_AND_TABLE)


def test_programs_without_a_gpu_do_not_branch_on_the_platform():
    """The choice is complete before lowering on a machine without a GPU."""
    assert "platform_index" not in str(
        jax.make_jaxpr(functools.partial(attend_map, None))(MAP, *FREQS_AND_TABLE)
    )


@pytest.mark.parametrize(("op", "args", "kwargs"), CALLS, ids=lambda x: getattr(x, "__name__", ""))
def test_explain_lists_every_implementation(op, args, kwargs):
    reasons = explain(op, *args, **kwargs)
    assert list(reasons) == list(dispatch.IMPLEMENTATIONS[op.__name__])
    assert reasons.pop("xla") == "ok"
    assert all("GPU" in reason for reason in reasons.values())


def test_explain_refuses_other_functions():
    namesake = types.FunctionType((lambda x: x).__code__, {}, "rotate")
    for op in (jnp.sum, namesake):
        with pytest.raises(
            ValueError, match=r"is not an operation of rope_jax_kernels; use one of \['rotate'"
        ):
            explain(op, X)
    with pytest.raises(TypeError, match=r"explain\(attention, .*'pattern'; it takes attention\(q"):
        explain(attention, X, X, X)
    assert {op.__name__ for op, *_ in CALLS} == set(dispatch.IMPLEMENTATIONS)


def test_explain_raises_what_the_call_would_raise():
    with pytest.raises(ValueError, match=r"q has shape \(.*\[B, H, W, N, D\]"):
        explain(attention, X, X, X, pattern=Window((2, 2)))


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


@pytest.mark.process
def test_jax_without_pallas_serves_everything_else():
    program = (
        "import sys, jax, jax.numpy as jnp\n"
        "sys.modules['jax.experimental.pallas'] = None\n"
        "sys.modules['jax.experimental.pallas.triton'] = None\n"
        "from rope_jax_kernels import *\n"
        "x = jnp.ones((2, 4, 4, 2, 16))\n"
        "attention(x, x, x, pattern=Window((2, 2)))\n"
        "gpu = jax.sharding.AbstractDevice('NVIDIA H200', 132, 'gpu')\n"
        "mesh = jax.sharding.AbstractMesh((1,), ('d',), abstract_device=gpu)\n"
        "with jax.sharding.use_abstract_mesh(mesh):\n"
        "    jax.eval_shape(lambda x: attention(x, x, x, pattern=Window((2, 2))), x)\n"
        "    reasons = explain(attention, x, x, x, pattern=Window((2, 2)))\n"
        "print(reasons)\n"
        "assert reasons['xla'] == 'ok'\n"
        "assert 'does not have what it needs' in reasons['triton']\n"
        "assert 'pallas' in reasons['triton']\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(("tokens", "name"), [(256, "mosaic"), (257, "triton")])
def test_triton_runs_mosaics_backward_pass_for_many_tokens(tokens, name):
    x = jax.ShapeDtypeStruct((1, tokens, 3, 2, 64), jnp.bfloat16)
    attend = functools.partial(attention_qkv, pattern=Global(), implementation="mosaic")
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        gradient = jax.make_jaxpr(jax.grad(lambda x: attend(x).astype(jnp.float32).sum()))(x)
    assert ("attention_query_kernel" in str(gradient)) == (name == "triton")
    assert ("attention_mosaic_backward" in str(gradient)) == (name == "mosaic")


@pytest.mark.parametrize("kernel", ["triton", "mosaic"])
def test_kernels_lower_for_a_gpu_with_float64_enabled(kernel, x64):
    """Their indices still have 32 bits, although loops of several rounds count in 64."""

    def attend(qkv, freqs):
        coords = jnp.zeros((qkv.shape[1], 2), jnp.float32)
        rotation = Rotation(coords, freqs)
        turned = rotate_qkv(qkv, rotation, implementation=kernel)
        return attention_qkv(
            turned, pattern=Global(), rotation=rotation, implementation=kernel
        ).sum(dtype=jnp.float32)

    qkv = jax.ShapeDtypeStruct((256, 65, 3, 6, 32), jnp.bfloat16)
    freqs = jax.ShapeDtypeStruct((6, 2, 8), jnp.float32)
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        jax.jit(jax.grad(attend, (0, 1))).trace(qkv, freqs).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("kernel", ["xla", "triton", "mosaic"])
@pytest.mark.parametrize("name", ["vit_s", "swin_t_1", "nat_mini_1", "dinat_mini_1"])
def test_no_ranks_are_promoted(name, kernel):
    """Users may forbid promotion: `jax_numpy_rank_promotion="raise"`."""
    target = abstract_mesh("cpu" if kernel == "xla" else "NVIDIA H200")
    layer = dataclasses.replace(LAYERS[name], bias=(name, kernel) != ("vit_s", "mosaic"))
    with jax.numpy_rank_promotion("raise"), jax.sharding.use_abstract_mesh(target):
        jax.eval_shape(functools.partial(train, layer, kernel), *layer.shapes(2).values())
