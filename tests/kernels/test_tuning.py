"""Calls recorded, measured, and served by the choices.

The candidates are fake implementations of attention: the reference with a delay and a fault.
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
from tests.kernels.test_dispatch import abstract_mesh

X = jax.ShapeDtypeStruct((3, 5, 1, 8), jnp.float32)


def attend(x):
    return attention(x, x, x, pattern=Global())


def record_calls(f, *arguments):
    with record() as calls:
        jax.eval_shape(f, *arguments)
    return calls


@pytest.fixture
def fakes(monkeypatch, interpreted):
    """Registers implementations of attention: name -> (seconds, change); returns traced names."""

    def register(**behaviours):
        implementations, traced = {"xla": (0.02, None)} | behaviours, []
        for name, (seconds, change) in implementations.items():
            module = types.ModuleType(f"rope_jax_kernels.{name}")

            def attend(name=name, seconds=seconds, change=change, **arguments):
                traced.append(name)
                out = reference.attention(**arguments)
                out += run_on_host(lambda: time.sleep(seconds), arguments["q"])
                return out if change is None else change(out)

            module.attention, module.refusal = attend, lambda *_, **__: None
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(
            dispatch.IMPLEMENTATIONS, "attention", {name: name for name in implementations}
        )
        return traced

    return register


def run_on_host(work, x):
    """Calls `work` whenever a program with x runs; returns its result, or zero for None."""
    dependency = jax.lax.stop_gradient(x.ravel()[0]).astype(jnp.float32)
    callback = lambda _: np.float32(work() or 0.0)
    return jax.pure_callback(callback, jax.ShapeDtypeStruct((), jnp.float32), dependency).astype(
        x.dtype
    )


noise = itertools.cycle([0.0, 5e-8])


def vary(out):
    return out + run_on_host(lambda: next(noise), out)


def fail(out):
    def stop():
        raise RuntimeError("an illegal memory access")

    return out + run_on_host(stop, out)


def fail_to_compile(out):
    raise NotImplementedError("no such instruction")


@jax.custom_jvp
def wrong_backwards(out):
    return out


wrong_backwards.defjvp(lambda primals, tangents: (primals[0], 1.1 * tangents[0]))


def measure(calls, seconds=60.0):
    messages = []
    return tune(calls, seconds=seconds, say=messages.append), messages


def only_measured(choices):
    ((measured,),) = (by_direction.values() for by_direction in choices.calls.values())
    return measured


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda out: 1.01 * out, "is wrong: its output 0 is off by"),
        (vary, "is wrong: its output 0 differs between two equal runs"),
        (fail, "fails: "),
        (fail_to_compile, "fails: NotImplementedError: no such instruction"),
    ],
    ids=["wrong", "unequal", "crashing", "not compiling"],
)
def test_the_fastest_correct_candidate_is_chosen(fakes, fault, reason):
    fakes(faulty=(0.0, fault), fast=(0.005, None), slow=(0.05, None))
    choices, (message,) = measure(record_calls(attend, X))
    measured = only_measured(choices)
    assert (measured.choice, measured.default) == (Choice("fast"), "xla")
    assert list(measured.microseconds) == ["xla", "fast", "slow"]
    assert 5e3 <= measured.microseconds["fast"] < measured.microseconds["xla"]
    assert measured.left_out["faulty"].startswith(reason)
    assert message.startswith(f"faulty {reason}")
    assert "left out of attention q=float32[3,5,1,8]" in message


def test_gradients_are_compared(fakes):
    """Gradients of all required operands are compared; here one of the bias is wrong."""

    def loss(x, bias):
        return attention(x, x, x, pattern=Global(), bias=bias).sum()

    fakes(wrong=(0.0, wrong_backwards), fast=(0.005, None))
    calls = record_calls(jax.grad(loss, argnums=1), X, jax.ShapeDtypeStruct((1, 5, 5), jnp.float32))
    choices, _ = measure(calls)
    assert list(*choices.calls.values()) == ["training"]
    assert only_measured(choices).choice == Choice("fast")
    assert "gradient of bias is off by" in only_measured(choices).left_out["wrong"]


@pytest.mark.parametrize(("gain", "expected"), [(0.99, "xla"), (0.97, "same")])
def test_a_gain_within_the_noise_keeps_the_default(fakes, monkeypatch, gain, expected):
    fakes(same=(0.0, None))
    times = iter([10.0, 10.0 * gain])
    monkeypatch.setattr(Trial, "time", lambda *_: next(times))
    assert only_measured(measure(record_calls(attend, X))[0]).choice == Choice(expected)


def test_calls_beyond_the_time_limit_keep_their_defaults(fakes):
    fakes(fast=(0.0, None))
    choices, messages = measure(record_calls(attend, X), seconds=0.0)
    assert choices.calls == {}
    assert messages == ["1 of 1 calls were not measured and keep their defaults"]


def test_calls_are_recorded_once_with_their_gradients():
    rotation = Rotation(jnp.ones((5, 2)), jnp.ones((1, 2, 3)))

    def f(x, freqs):
        for _ in range(3):
            x, _ = rotate(x, x, Rotation(rotation.coords, freqs))
        return (attend(x) + attention(x, x, x, pattern=Global(), implementation="xla")).sum()

    calls = record_calls(jax.grad(jax.checkpoint(f)), X, rotation.freqs)
    assert [(call.op, call.default) for call in calls] == [("rotate", "xla"), ("attention", "xla")]
    assert calls[0].count >= 3
    assert calls[0].key == call_key("rotate", calls[0].arguments)
    assert "rotation=half(float32[5,2],float32[1,2,3]) layout=BLND" in calls[0].key
    # All rotations have gradients of q and k, as the first one turns x itself.
    assert [sorted(call.gradients) for call in calls] == [["k", "q"], ["k", "q", "v"]]
    learned = record_calls(jax.grad(f, argnums=1), X, rotation.freqs)
    assert sorted(learned[0].gradients) == ["k", "q", "rotation.freqs"]
    forward = [(call.count, call.direction) for call in record_calls(f, X, rotation.freqs)]
    assert forward == [(3, "forward"), (1, "forward")]


def test_calls_that_xla_may_partition_are_not_recorded():
    with jax.sharding.use_abstract_mesh(abstract_mesh(devices=8)):
        assert record_calls(attend, X) == []
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        assert len(record_calls(attend, X)) == 1


def choices_for(key, device="cpu", **by_direction):
    measured = {
        name: Measured(choice, "xla", {"xla": 2.0, choice.name: 1.0}, {"mosaic": "is wrong"})
        for name, choice in by_direction.items()
    }
    return Choices(device, jax.__version__, {key: measured})


def test_active_choices_serve_calls(fakes):
    """Choices for training precede those for the forward pass; compiled calls are traced again."""
    traced, (call,) = fakes(fast=(0.0, None), other=(0.0, None)), record_calls(attend, X)
    forward = choices_for(call.key, forward=Choice("fast"))
    trained_too = choices_for(call.key, forward=Choice("fast"), training=Choice("other"))
    f, x, served = jax.jit(attend), jnp.ones(X.shape), []
    for choices in (Choices(), forward, trained_too, Choices(everywhere="fast")):
        traced.clear()
        with choices:
            jax.block_until_ready(f(x))
        served += traced
    assert served == ["xla", "fast", "other", "fast"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"device": "NVIDIA L4"}, "not used: they were measured on another kind of device"),
        ({"sources": "0a1b2c3d"}, "not used: they were measured with other sources"),
        ({}, "triton does not serve a call of attention: the head dimension is 8"),
    ],
)
def test_choices_that_do_not_fit_are_not_used_and_reported_once(changed, reason, capsys):
    (call,) = record_calls(attend, X)
    choices = dataclasses.replace(choices_for(call.key, forward=Choice("triton")), **changed)
    with Choices.from_json(choices.to_json()):
        jax.eval_shape(lambda x: attend(x) + attend(x), X)
    (message,) = capsys.readouterr().err.splitlines()
    assert reason in message


TILE = (("queries", (32, 16, 4, 2)), ("keys", (16, 16, 4, 2)))


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"format": 2}', '{"format": 1, "device": "x", "jax": "1"}']
)
def test_a_damaged_file_is_refused(text):
    with pytest.raises(ValueError, match="these are no choices of kernels"):
        Choices.from_json(text)


MAP = jax.ShapeDtypeStruct((4, 14, 14, 3, 2, 32), jnp.bfloat16)


def count_kernels(f, *shapes):
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        traced = jax.make_jaxpr(lambda *x: f(*x))(*shapes)  # anew: a cached trace reads no file
        return str(traced).count("pallas_call")


def test_the_default_reads_cached_and_shipped_choices(tmp_path, monkeypatch, capsys):
    def windows(x):
        return attention_qkv(x, pattern=Window((7, 7)))

    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        (call,) = record_calls(windows, MAP)
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
    assert count_kernels(windows, MAP) == 0
    with makes("triton"):
        assert count_kernels(windows, MAP) == 1
    path.write_text("{")
    assert count_kernels(windows, MAP) == 1
    assert f"the choices in {path} are ignored" in capsys.readouterr().err


def test_measured_tiles_of_attention_reach_all_kernels():
    def loss(x):
        # Coordinates, of which the kernels have no gradient, stay constant.
        rotation = Rotation(jnp.ones((14 * 14, 2)), jnp.ones((1, 2, 4)))
        out = attention_qkv(x, pattern=Neighborhood((7, 7)), rotation=rotation)
        return out.astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        (call,) = record_calls(jax.grad(loss), MAP)
        chosen = Choice("triton", (("forward", (32, 32, 2, 3)), *TILE))
        with choices_for(call.key, "NVIDIA H200", training=chosen):
            jaxpr = str(jax.make_jaxpr(jax.grad(loss))(MAP))
    assert [jaxpr.count(f"num_stages={n}") for n in (1, 2, 3)] == [0, 2, 1]


def turn(x, freqs):
    return rotate(x, x, Rotation(jnp.ones((4, 1)), freqs))


def train(x, freqs):
    return jax.grad(lambda *x: sum(y.sum() for y in turn(*x)), argnums=(0, 1))(x, freqs)


@pytest.mark.parametrize("f", [turn, train])
def test_a_real_kernel_is_compared_and_timed(f, interpreted, monkeypatch):
    tiles = OTHER_TILES["rotary.triton"]
    monkeypatch.setitem(OTHER_TILES, "rotary.triton", lambda *arguments: tiles(*arguments)[:1])
    calls = record_calls(f, jax.ShapeDtypeStruct((3, 4, 1, 8), jnp.float32), jnp.ones((1, 1, 2)))
    measured = only_measured(tune(calls, seconds=100.0, say=pytest.fail))
    other = Choice("triton", (("rows", (256, 1, 1, 8)),)).name
    assert set(measured.microseconds) == {"xla", "triton", other}
    assert measured.left_out == {}
    assert min(measured.microseconds.values()) > 0


@pytest.mark.parametrize("calls", [rotate, [rotate], "rotate"])
def test_unrecorded_calls_are_refused(calls, unchecked_annotations):
    with pytest.raises(TypeError, match=r"must be calls that were recorded: .*`with record\(\)"):
        tune(calls)


def test_without_calls_nothing_is_tuned(interpreted):
    choices, (message,) = measure([])
    assert choices.calls == {}
    assert message.startswith("nothing to tune: no call was recorded.")
