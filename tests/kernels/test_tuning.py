"""Calls recorded, measured, and served by the choices.

The candidates are fake implementations of attention: the reference with a cost, and a fault.
"""

import dataclasses
import itertools
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax_kernels import (
    Choices,
    Global,
    Neighborhood,
    Rotation,
    Window,
    attention,
    attention_qkv,
    dispatch,
    record,
    rotate,
    tune,
)
from rope_jax_kernels.attention import reference
from rope_jax_kernels.tuning.choices import Choice, Measured, hash_sources
from rope_jax_kernels.tuning.measure import Trial
from rope_jax_kernels.tuning.record import call_key
from rope_jax_kernels.tuning.tiles import OTHER_TILES
from tests.kernels.test_dispatch import mesh_of

X = jax.ShapeDtypeStruct((3, 5, 1, 8), jnp.float32)


def attend(x):
    return attention(x, x, x, pattern=Global())


def calls_of(f, *arguments):
    with record() as calls:
        jax.eval_shape(f, *arguments)
    return calls


@pytest.fixture
def fakes(monkeypatch, interpreted):
    """Registers implementations of attention: name -> (seconds, change); returns what is traced."""

    def register(**behaviours):
        own, traced = {"xla": (0.02, None)} | behaviours, []
        for name, (seconds, change) in own.items():
            module = types.ModuleType(f"rope_jax_kernels.{name}")

            def attend(name=name, seconds=seconds, change=change, **arguments):
                traced.append(name)
                out = reference.attention(**arguments)
                out += computed_by(lambda: time.sleep(seconds), arguments["q"])
                return out if change is None else change(out)

            module.attention, module.refusal = attend, lambda *_, **__: None
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "attention", {name: name for name in own})
        return traced

    return register


def computed_by(work, x):
    """What `work` returns, or zero for None, computed whenever a program with x runs."""
    one = jax.lax.stop_gradient(x.ravel()[0]).astype(jnp.float32)
    callback = lambda _: np.float32(work() or 0.0)
    return jax.pure_callback(callback, jax.ShapeDtypeStruct((), jnp.float32), one).astype(x.dtype)


noise = itertools.cycle([0.0, 5e-8])


def differs(out):
    return out + computed_by(lambda: next(noise), out)


def fails(out):
    def stop():
        raise RuntimeError("an illegal memory access")

    return out + computed_by(stop, out)


def does_not_compile(out):
    raise NotImplementedError("no such instruction")


@jax.custom_jvp
def wrong_backwards(out):
    return out


wrong_backwards.defjvp(lambda primals, tangents: (primals[0], 1.1 * tangents[0]))


def measured_by(calls, seconds=60.0):
    said = []
    return tune(calls, seconds=seconds, say=said.append), said


def only(choices):
    ((measured,),) = (found.values() for found in choices.calls.values())
    return measured


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda out: 1.01 * out, "is wrong: its output 0 is off by"),
        (differs, "is wrong: its output 0 differs between two equal runs"),
        (fails, "fails: "),
        (does_not_compile, "fails: NotImplementedError: no such instruction"),
    ],
    ids=["wrong", "unequal", "crashing", "not compiling"],
)
def test_the_fastest_that_is_right_is_chosen(fakes, fault, reason):
    fakes(faulty=(0.0, fault), fast=(0.005, None), slow=(0.05, None))
    choices, (said,) = measured_by(calls_of(attend, X))
    found = only(choices)
    assert (found.choice, found.default) == (Choice("fast"), "xla")
    assert list(found.microseconds) == ["xla", "fast", "slow"]
    assert 5e3 <= found.microseconds["fast"] < found.microseconds["xla"]
    assert found.left_out["faulty"].startswith(reason)
    assert said.startswith(f"faulty {reason}")
    assert "left out of attention q=float32[3,5,1,8]" in said


def test_gradients_are_compared(fakes):
    """Of all operands whose gradient is wanted: here of the bias, through which one is wrong."""

    def loss(x, bias):
        return attention(x, x, x, pattern=Global(), bias=bias).sum()

    fakes(wrong=(0.0, wrong_backwards), fast=(0.005, None))
    calls = calls_of(jax.grad(loss, argnums=1), X, jax.ShapeDtypeStruct((1, 5, 5), jnp.float32))
    choices, _ = measured_by(calls)
    assert list(*choices.calls.values()) == ["training"]
    assert only(choices).choice == Choice("fast")
    assert "gradient of bias is off by" in only(choices).left_out["wrong"]


@pytest.mark.parametrize(("gain", "chosen"), [(0.99, "xla"), (0.97, "same")])
def test_a_gain_within_the_noise_keeps_the_default(fakes, monkeypatch, gain, chosen):
    fakes(same=(0.0, None))
    times = iter([10.0, 10.0 * gain])
    monkeypatch.setattr(Trial, "time", lambda *_: next(times))
    assert only(measured_by(calls_of(attend, X))[0]).choice == Choice(chosen)


def test_calls_beyond_the_time_keep_their_defaults(fakes):
    fakes(fast=(0.0, None))
    choices, said = measured_by(calls_of(attend, X), seconds=0.0)
    assert choices.calls == {}
    assert said == ["1 of 1 calls were not measured and keep their defaults"]


def test_calls_are_noted_once_with_their_gradients():
    rotation = Rotation(jnp.ones((5, 2)), jnp.ones((1, 2, 3)))

    def f(x, freqs):
        for _ in range(3):
            x, _ = rotate(x, x, Rotation(rotation.coords, freqs))
        return (attend(x) + attention(x, x, x, pattern=Global(), implementation="xla")).sum()

    calls = calls_of(jax.grad(jax.checkpoint(f)), X, rotation.freqs)
    assert [(call.op, call.default) for call in calls] == [("rotate", "xla"), ("attention", "xla")]
    assert calls[0].count >= 3
    assert calls[0].key == call_key("rotate", calls[0].arguments)
    assert "rotation=half(float32[5,2],float32[1,2,3]) layout=BLND" in calls[0].key
    # The first rotation turns an input, whose gradient is that of x; so do the others.
    assert [sorted(call.gradients) for call in calls] == [["k", "q"], ["k", "q", "v"]]
    learned = calls_of(jax.grad(f, argnums=1), X, rotation.freqs)
    assert sorted(learned[0].gradients) == ["k", "q", "rotation.freqs"]
    forward = [(call.count, call.direction) for call in calls_of(f, X, rotation.freqs)]
    assert forward == [(3, "forward"), (1, "forward")]


def test_calls_that_xla_may_partition_are_not_noted():
    with jax.sharding.use_abstract_mesh(mesh_of(devices=8)):
        assert calls_of(attend, X) == []
    with jax.sharding.use_abstract_mesh(mesh_of()):
        assert len(calls_of(attend, X)) == 1


def choices_for(key, device="cpu", **by_direction):
    found = {
        name: Measured(choice, "xla", {"xla": 2.0, choice.name: 1.0}, {"mosaic": "is wrong"})
        for name, choice in by_direction.items()
    }
    return Choices(device, jax.__version__, {key: found})


def test_the_choice_in_force_serves_a_call(fakes):
    """One that was measured with gradients before one without; a compiled call is traced again."""
    traced, (call,) = fakes(fast=(0.0, None), other=(0.0, None)), calls_of(attend, X)
    forward = choices_for(call.key, forward=Choice("fast"))
    both = choices_for(call.key, forward=Choice("fast"), training=Choice("other"))
    f, x, found = jax.jit(attend), jnp.ones(X.shape), []
    for choices in (Choices(), forward, both, Choices(everywhere="fast")):
        traced.clear()
        with choices:
            jax.block_until_ready(f(x))
        found += traced
    assert found == ["xla", "fast", "other", "fast"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"device": "NVIDIA L4"}, "measured on another kind of device, NVIDIA L4"),
        ({"sources": "0a1b2c3d"}, "measured with other sources of the kernels"),
    ],
)
def test_choices_measured_elsewhere_are_not_used(fakes, capsys, changed, reason):
    traced, (call,) = fakes(fast=(0.0, None)), calls_of(attend, X)
    traced.clear()
    choices = dataclasses.replace(choices_for(call.key, forward=Choice("fast")), **changed)
    with Choices.from_json(choices.to_json()):
        jax.eval_shape(lambda x: attend(x) + attend(x), X)
    assert set(traced) == {"xla"}
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith(f"choices are not used: they were {reason}")


def test_a_choice_that_is_refused_is_reported_once(capsys):
    (call,) = calls_of(attend, X)
    with choices_for(call.key, forward=Choice("triton")):
        jax.eval_shape(lambda x: attend(x) + attend(x), X)
    (said,) = capsys.readouterr().err.splitlines()
    assert "triton does not serve a call of attention: the head dimension is 8" in said


TILE = (("queries", (32, 16, 4, 2)), ("keys", (16, 16, 4, 2)))


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"format": 2}', '{"format": 1, "device": "x", "jax": "1"}']
)
def test_a_damaged_file_is_refused(text):
    with pytest.raises(ValueError, match="these are no choices of kernels"):
        Choices.from_json(text)


MAP = jax.ShapeDtypeStruct((4, 14, 14, 3, 2, 32), jnp.bfloat16)


def kernels_of(f, *shapes):
    with jax.sharding.use_abstract_mesh(mesh_of()):
        traced = jax.make_jaxpr(lambda *x: f(*x))(*shapes)  # anew: a cached trace reads no file
        return str(traced).count("pallas_call")


def test_none_reads_the_cache_folder_and_what_ships(tmp_path, monkeypatch, capsys):
    def windows(x):
        return attention_qkv(x, pattern=Window((7, 7)))

    with jax.sharding.use_abstract_mesh(mesh_of()):
        (call,) = calls_of(windows, MAP)
    makes = lambda name: choices_for(call.key, "NVIDIA H200", forward=Choice(name))
    other = choices_for("another call", "NVIDIA H200", forward=Choice("triton", TILE))
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    monkeypatch.setenv("ROPE_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr("rope_jax_kernels.tuning.choices.SHIPPED", shipped)
    other.remember()
    path = makes("xla").remember()
    assert Choices.load(path).calls == other.calls | makes("xla").calls
    name = f"nvidia_h200-jax{jax.__version__}-{hash_sources()}.json"
    assert path == tmp_path / "kernels" / name
    # The user's own choices come before those that ship.
    makes("triton").save(shipped / name)
    assert kernels_of(windows, MAP) == 0
    with makes("triton"):
        assert kernels_of(windows, MAP) == 1
    path.write_text("{")
    assert kernels_of(windows, MAP) == 1
    assert f"the choices in {path} are ignored" in capsys.readouterr().err


def test_measured_tiles_of_attention_reach_all_kernels():
    def loss(x):
        # Coordinates, of which the kernels have no gradient, stay constant.
        rotation = Rotation(jnp.ones((14 * 14, 2)), jnp.ones((1, 2, 4)))
        out = attention_qkv(x, pattern=Neighborhood((7, 7)), rotation=rotation)
        return out.astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(mesh_of()):
        (call,) = calls_of(jax.grad(loss), MAP)
        chosen = Choice("triton", (("forward", (32, 32, 2, 3)), *TILE))
        with choices_for(call.key, "NVIDIA H200", training=chosen):
            jaxpr = str(jax.make_jaxpr(jax.grad(loss))(MAP))
    assert [jaxpr.count(f"num_stages={n}") for n in (1, 2, 3)] == [0, 2, 1]


def turned(x, freqs):
    return rotate(x, x, Rotation(jnp.ones((4, 1)), freqs))


def trained(x, freqs):
    return jax.grad(lambda *x: sum(y.sum() for y in turned(*x)), argnums=(0, 1))(x, freqs)


@pytest.mark.parametrize("f", [turned, trained])
def test_a_real_kernel_is_compared_and_timed(f, interpreted, monkeypatch):
    tiles = OTHER_TILES["rotary.triton"]
    monkeypatch.setitem(OTHER_TILES, "rotary.triton", lambda *arguments: tiles(*arguments)[:1])
    calls = calls_of(f, jax.ShapeDtypeStruct((3, 4, 1, 8), jnp.float32), jnp.ones((1, 1, 2)))
    found = only(tune(calls, seconds=100.0, say=pytest.fail))
    other = Choice("triton", (("rows", (256, 1, 1, 8)),)).name
    assert set(found.microseconds) == {"xla", "triton", other}
    assert found.left_out == {}
    assert min(found.microseconds.values()) > 0


@pytest.mark.parametrize("calls", [rotate, [rotate], "rotate"])
def test_what_was_not_recorded_is_refused(calls, unchecked_annotations):
    with pytest.raises(TypeError, match=r"must be calls that were recorded: .*`with record\(\)"):
        tune(calls)


def test_without_calls_there_is_nothing_to_tune(interpreted):
    choices, (said,) = measured_by([])
    assert choices.calls == {}
    assert said.startswith("nothing to tune: no call was recorded.")
