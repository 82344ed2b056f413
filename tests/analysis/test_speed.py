import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.analysis import speed, timing
from rope_jax.papers import published
from rope_jax_kernels import dispatch


def test_sizes_are_those_of_the_thesis():
    printed = [cell.value.split(", ") for cell in published("thesis/table_A.1")]
    sizes = speed.rotation_sizes(small=False)
    assert sizes == list(itertools.product(*(map(int, axis) for axis in printed)))
    assert {cell.key["precision"] for cell in published("thesis/table_A.2")} == {*speed.PRECISIONS}


def rotate_exactly(x, theta):
    """The definition in float64: pairs of channels are complex numbers."""
    x, pairs = np.float64(x), theta.shape[-1]
    turned = (x[..., :pairs] + 1j * x[..., pairs : 2 * pairs]) * np.exp(1j * np.float64(theta))
    return np.concatenate([turned.real, turned.imag, x[..., 2 * pairs :]], -1)


@pytest.mark.parametrize(("precision", "k_rope"), [("16-16", 1), ("16-32", 4), ("32-32", 2)])
def test_forms_compute_the_rotation(precision, k_rope):
    size = (2, 3, 5, 16)
    (x,), theta = speed.rotation_operands(
        size, speed.PRECISIONS[precision], tables=False, k_rope=k_rope
    )
    assert (x.shape, theta.shape) == ((2, 1, 3 * 25, 16), (1, 3 * 25, 16 // 2 // k_rope))
    assert (x.dtype.name, theta.dtype.name) == speed.PRECISIONS[precision]
    expected, forms = rotate_exactly(x, theta), speed.rotation_forms(size, precision, k_rope)
    for start in forms.values():
        (result,), _ = start()
        np.testing.assert_allclose(result, expected, atol=4 * jnp.finfo(x.dtype).eps * abs(x).max())


GPU = types.SimpleNamespace(is_gpu=lambda: True)


@pytest.mark.parametrize("fault", [np.nan, 1.01])
def test_a_form_that_computes_something_else_is_an_error(fault, monkeypatch):
    rotate = speed.rotate_by_tables
    monkeypatch.setattr(speed, "rotate_by_tables", lambda *operands: fault * rotate(*operands))
    with pytest.raises(RuntimeError, match=r"'compiled' differs from 'eager' by (nan|0.0)"):
        speed.time_rotation((1, 3, 7, 32), "16-32", turns=1)


@pytest.mark.parametrize("in_place", [True, False])
def test_every_step_of_a_loop_computes_separately(in_place):
    xs = (jnp.arange(3.0), jnp.arange(3.0, 6.0))
    loop = timing.make_loop(lambda x, y: x + y, 3, in_place=in_place)
    results = jax.jit(loop)(xs, jnp.float32(2))
    rounds = 3 * 2 * 4 // 2 if in_place else 1
    expected = [x + 2 * rounds for x in xs]
    assert timing.count_steps(2) == 8
    np.testing.assert_allclose(results, expected if in_place else expected * 4)


def test_turns_alternate_and_medians_are_taken():
    calls, times = [], {"a": iter([1.0, 9.0, 2.0]), "b": iter([5.0, 4.0, 6.0])}

    def take(name):
        calls.append(name)
        return next(times[name])

    timers = {name: functools.partial(take, name) for name in times}
    assert timing.take_turns(timers, 3) == {"a": 2.0, "b": 5.0}
    assert calls == ["a", "b"] * 3


@pytest.mark.parametrize("fused", [False, True])
def test_throughput_of_a_model(fused, monkeypatch):
    """All calls are plain XLA unless `fused`, and the clock shows one second for every turn."""
    seconds, taken, run = itertools.count(), set(), dispatch.run

    def note(op, name, arguments, tile=()):
        taken.add(name)
        return run(op, "xla", arguments)

    monkeypatch.setattr(dispatch, "resolve", lambda *_: "triton")  # the default
    monkeypatch.setattr(dispatch, "run", note)
    monkeypatch.setattr(speed, "device", GPU)
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    monkeypatch.setattr(timing, "time", clock)
    options = {"batch": 3, "dtype": "float32", "image_size": (8, 12), "turns": 2, "depth": 1}
    images = speed.images_per_second("vit_digits", "axial_rope", fused=fused, **options)
    assert images == 3 * timing.CALLS
    assert taken == {"triton" if fused else "xla"}


def test_weights_have_the_dtype_of_the_images(monkeypatch):
    """Except those of the position, which need float32."""
    made = []

    def record(step, new_state, images):
        made.append((new_state()[0], images))
        return new_state

    monkeypatch.setattr(speed, "compile_program", record)
    images = jax.ShapeDtypeStruct((2, 8, 8, 3), "float16")
    speed.compile_forward("vit_digits", "rope_mixed", images, depth=1)
    ((params, got),) = made
    dtypes = {
        ("position" in jax.tree_util.keystr(path), x.dtype.name)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    assert dtypes == {(True, "float32"), (False, "float16")}
    assert got == images


def test_fused_models_are_refused_on_a_cpu(monkeypatch):
    monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"fused=True needs a GPU, .* interpreted kernels are not"):
        speed.images_per_second("vit_digits", "axial_rope", fused=True, batch=1, image_size=8)


@pytest.mark.parametrize(("device", "fused"), [(speed.device, []), (GPU, ["fused"])])
def test_kernels_are_timed_on_a_gpu_only(device, fused, monkeypatch):
    implementations = set()

    def rotate(x, theta, *, layout, implementation):  # stands for rope_jax_kernels'
        implementations.add(implementation)
        return speed.rotate_by_tables(x, jnp.cos(theta), jnp.sin(theta))

    monkeypatch.setattr(speed, "device", device)
    monkeypatch.setattr(speed, "rotate_by_angles", rotate)
    times = speed.time_rotation((1, 3, 7, 32), "32-32", turns=1)
    assert [*times] == ["eager", "compiled", *fused]
    assert implementations == ({"xla", "triton"} if fused else {"xla"})
    assert min(times.values()) > 0
