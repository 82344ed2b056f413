"""Calls recorded, measured by an injected clock, and served by the choices.

The candidates are fake implementations of attention: the reference with a cost, and a fault.
"""

import concurrent.futures
import dataclasses
import itertools
import signal
import sys
import threading
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
    tuning,
)
from rope_jax_kernels.attention import reference
from rope_jax_kernels.cache import sources_of_kernels
from rope_jax_kernels.calls import Call, key_of
from rope_jax_kernels.choices import Choice, Measured, _read
from rope_jax_kernels.measure import Problem
from rope_jax_kernels.rotary import triton
from tests.kernels.test_dispatch import mesh_of

X = jax.ShapeDtypeStruct((3, 5, 1, 8), jnp.float32)


class Clock:
    """Seconds that pass only where a fake implementation spends them."""

    now = 0.0

    def __call__(self):
        return self.now

    def spend(self, q, seconds, effect=lambda: 0.0):
        """Zero, computed by a program that spends `seconds` whenever it computes it."""

        def callback(_):
            self.now += seconds
            return np.float32(effect())

        one = jax.lax.stop_gradient(q.ravel()[0]).astype(jnp.float32)
        return jax.pure_callback(callback, jax.ShapeDtypeStruct((), jnp.float32), one)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fakes(monkeypatch, clock, interpreted):
    """Registers fake implementations of attention: name -> (seconds, change of the result)."""

    def register(**behaviours):
        own = {"xla": (10.0, None)} | behaviours
        for name, (seconds, change) in own.items():
            module = types.ModuleType(f"rope_jax_kernels.{name}")

            def attend(seconds=seconds, change=change, **arguments):
                effect = change if change in EFFECTS else lambda: 0.0
                zero = clock.spend(arguments["q"], seconds, effect)
                out = reference.attention(**arguments)
                out += zero.astype(out.dtype)
                return out if change is None or change in EFFECTS else change(out)

            module.attention = attend
            module.refusal = lambda **_: None
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "attention", {name: name for name in own})

    return register


noise = itertools.cycle([0.0, 5e-8])
released = threading.Event()


def differs():
    return next(noise)


def fails():
    raise RuntimeError("an illegal memory access")


def hangs():
    released.wait(60)
    return 0.0


EFFECTS = [differs, fails, hangs]


def does_not_compile(out):
    raise NotImplementedError("no such instruction")


def does_not_end_compiling(out):
    released.wait(60)
    return out


@pytest.fixture(autouse=True)
def release():
    released.clear()
    yield
    released.set()


def attend(x):
    return attention(x, x, x, pattern=Global())


def calls_of(f, *arguments):
    with record() as calls:
        jax.eval_shape(f, *arguments)
    return calls


def measured_by(clock, calls, **options):
    said = []
    choices = tune(calls, clock=clock, say=said.append, **{"seconds": 60.0} | options)
    return choices, said


def only(choices):
    ((measured,),) = (found.values() for found in choices.calls.values())
    return measured


def test_the_fastest_that_is_right_is_chosen(fakes, clock):
    fakes(fast=(1.0, None), slow=(50.0, None), wrong=(0.1, lambda out: 1.01 * out))
    choices, said = measured_by(clock, calls_of(attend, X))
    found = only(choices)
    assert found.choice == Choice("fast")
    assert found.default == "xla"
    assert found.microseconds == pytest.approx({"xla": 10e6, "fast": 1e6, "slow": 50e6})
    assert list(found.left_out) == ["wrong"]
    (sentence,) = said
    assert sentence.startswith("wrong is wrong and is left out of attention q=float32[3,5,1,8]")
    assert "output 0 is off by" in sentence


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (differs, "output 0 differs between two equal runs"),
        (lambda out: out + 0 * out.mean(0), "output 0 changes if other examples are NaN"),
        (fails, "crashes: "),
        (does_not_compile, "does not compile: NotImplementedError: no such instruction"),
    ],
    ids=["unequal", "leaking", "crashing", "not compiling"],
)
def test_a_faulty_candidate_is_left_out(fakes, clock, fault, reason):
    fakes(faulty=(0.1, fault), fast=(1.0, None))
    choices, said = measured_by(clock, calls_of(attend, X))
    assert only(choices).choice == Choice("fast")
    assert reason in only(choices).left_out["faulty"]
    assert len(said) == 1
    assert said[0].startswith("faulty ")


def test_a_candidate_that_does_not_end_is_given_up(fakes, clock):
    fakes(hanging=(0.1, hangs), fast=(1.0, None))
    choices, said = measured_by(clock, calls_of(attend, X), limit_s=0.5)
    assert only(choices).choice == Choice("fast")
    assert only(choices).left_out == {"hanging": "does not end: no result within 0.5 s"}
    assert len(said) == 1


class Stopped(Exception):
    """Raised by a signal handler, as that of a training is."""


@pytest.mark.parametrize("phase", ["compiling", "measuring"])
def test_a_signal_ends_tuning(fakes, clock, phase):
    def stop(number, frame):
        raise Stopped

    sent = []

    def interrupted_and_slow(out=0.0):
        if not sent:
            sent.append(signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1))
        released.wait(10)
        return out

    if phase == "measuring":
        EFFECTS.append(interrupted_and_slow)
    fakes(slow=(0.1, interrupted_and_slow))
    previous = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(Stopped):
            measured_by(clock, calls_of(attend, X))
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_tuning_ends_where_the_device_no_longer_answers(fakes, clock, monkeypatch):
    fakes(hanging=(0.1, hangs), fast=(1.0, None))
    monkeypatch.setattr(tuning, "device_answers", lambda: False)
    choices, said = measured_by(clock, calls_of(attend, X), limit_s=0.5)
    assert only(choices).choice == Choice("xla")
    assert said[1].startswith("the device does not answer after hanging; tuning ends here")


def test_a_candidate_is_given_up_where_the_time_ends(fakes, clock, monkeypatch):
    fakes(hanging=(0.1, hangs), fast=(1.0, None))
    within, limits = tuning._within, []

    def recorded(limit_s, work):
        limits.append(limit_s)
        return within(limit_s, work)

    monkeypatch.setattr(tuning, "_within", recorded)
    monkeypatch.setattr(tuning, "device_answers", lambda: True)  # it has a limit of its own
    choices, _ = measured_by(clock, calls_of(attend, X), seconds=3.0, limit_s=60.0)
    assert 0 < max(limits) <= 3  # what is left, not the limit of a candidate
    reason = "is not measured: no time was left to run it"
    assert only(choices).left_out == {"hanging": reason, "fast": reason}
    assert only(choices).choice == Choice("xla")


def test_a_candidate_that_was_given_up_runs_no_more(fakes, clock):
    runs = []

    def slowly():
        runs.append(time.monotonic())
        time.sleep(0.4)
        return 0.0

    EFFECTS.append(slowly)
    fakes(slow=(0.1, slowly), fast=(1.0, None))
    choices, _ = measured_by(clock, calls_of(attend, X), limit_s=0.5)
    assert "does not end" in only(choices).left_out["slow"]
    time.sleep(0.7)
    assert len(runs) <= 2


def test_threads_have_the_settings_of_jax():
    def settings(_):
        config = jax.config
        mesh = jax.sharding.get_abstract_mesh()
        return config.jax_default_matmul_precision, config.jax_default_device, mesh

    with (
        jax.default_device(jax.devices()[0]),
        jax.default_matmul_precision("highest"),
        jax.sharding.use_abstract_mesh(mesh_of(devices=8)),
    ):
        assert tuning._within(10.0, settings) == (settings(None), None)


def test_tuning_ends_where_every_computation_fails(fakes, clock, monkeypatch):
    """As after an illegal memory access."""
    broken = []

    def breaks():
        broken.append(True)
        raise RuntimeError("an illegal memory access")

    def block_until_ready(x, wait=jax.block_until_ready):
        if broken:
            raise RuntimeError("an illegal memory access")
        return wait(x)

    EFFECTS.append(breaks)
    fakes(breaking=(0.1, breaks), fast=(1.0, None))
    monkeypatch.setattr(jax, "block_until_ready", block_until_ready)
    choices, said = measured_by(clock, calls_of(attend, X))
    assert only(choices).choice == Choice("xla")
    assert list(only(choices).left_out) == ["breaking"]
    assert said[1].startswith("the device does not answer after breaking; tuning ends here")


@pytest.mark.parametrize(("kind", "stays"), [(tuning.NOT_MEASURED, True), ("is wrong", False)])
def test_a_default_for_which_no_time_was_left_stays(kind, stays):
    call = Call("attention", {"q": X}, "default")
    times = {Choice("xla"): 10.0, Choice("fast"): 1.0}
    failures = {Choice("default"): (kind, "a reason")}
    found = tuning._chosen(Problem(call, "forward"), times, failures)
    assert found.choice == Choice("default" if stays else "fast")
    assert found.left_out == {"default": f"{kind}: a reason"}


def test_a_candidate_that_does_not_end_compiling_is_given_up(fakes, clock):
    fakes(endless=(0.1, does_not_end_compiling), fast=(1.0, None))
    choices, _ = measured_by(clock, calls_of(attend, X), seconds=4.0)
    assert only(choices).choice == Choice("fast")
    assert "is not measured: no time was left" in only(choices).left_out["endless"]


def test_calls_beyond_the_time_keep_their_defaults(fakes, clock):
    fakes(fast=(1.0, None))
    choices, said = measured_by(clock, calls_of(attend, X), seconds=0.0)
    assert choices.calls == {}
    assert said == ["1 of 1 calls were not measured within 0 s and keep their defaults"]


def test_what_is_far_slower_is_timed_once(fakes, clock):
    runs = {"near": 0, "far": 0}

    def counted(name):
        def effect():
            runs[name] += 1
            return 0.0

        EFFECTS.append(effect)
        return effect

    fakes(near=(11.0, counted("near")), far=(50.0, counted("far")))
    measured_by(clock, calls_of(attend, X))
    # Three comparisons, five steps to estimate, then runs of three steps.
    assert runs == {"near": 3 + 5 + 5 * 3, "far": 3 + 5 + 3}


def test_a_gain_within_the_noise_keeps_the_default(fakes, clock):
    fakes(same=(9.9, None))
    assert only(measured_by(clock, calls_of(attend, X))[0]).choice == Choice("xla")


def test_gradients_are_compared(fakes, clock):
    """Of all operands whose gradient is wanted: here of the bias, through which one is wrong."""

    def loss(x, bias):
        return attention(x, x, x, pattern=Global(), bias=bias).sum()

    @jax.custom_jvp
    def wrong(out):
        return out

    wrong.defjvp(lambda primals, tangents: (primals[0], 1.1 * tangents[0]))
    fakes(wrong=(0.1, wrong), fast=(1.0, None))
    calls = calls_of(jax.grad(loss, argnums=1), X, jax.ShapeDtypeStruct((1, 5, 5), jnp.float32))
    choices, _ = measured_by(clock, calls)
    ((direction, found),) = next(iter(choices.calls.values())).items()
    assert direction == "gradient of bias"
    assert found.choice == Choice("fast")
    assert "gradient of bias is off by" in found.left_out["wrong"]


def test_calls_are_noted_once_with_their_gradients():
    rotation = Rotation(jnp.ones((5, 2)), jnp.ones((1, 2, 3)))

    def f(x, freqs):
        for _ in range(3):
            x, _ = rotate(x, x, Rotation(rotation.coords, freqs))
        return (attend(x) + attention(x, x, x, pattern=Global(), implementation="xla")).sum()

    calls = calls_of(jax.grad(jax.checkpoint(f)), X, rotation.freqs)
    assert [(call.op, call.default) for call in calls] == [("rotate", "xla"), ("attention", "xla")]
    assert calls[0].count >= 3
    assert calls[0].key == key_of("rotate", calls[0].arguments)
    assert "rotation=half(float32[5,2],float32[1,2,3]) layout=BLND" in calls[0].key
    # The first rotation turns an input, whose gradient is that of x; so do the others.
    assert list(calls[0].directions) == ["gradient of k, q"]
    assert list(calls[1].directions) == ["gradient of k, q, v"]
    learned = calls_of(jax.grad(f, argnums=1), X, rotation.freqs)
    assert list(learned[0].directions) == [
        "gradient of rotation.freqs",
        "gradient of k, q, rotation.freqs",
    ]
    forward = [call.directions for call in calls_of(f, X, rotation.freqs)]
    assert forward == [{"forward": 3}, {"forward": 1}]


def test_calls_that_xla_may_partition_are_not_noted():
    with jax.sharding.use_abstract_mesh(mesh_of(devices=8)):
        assert calls_of(attend, X) == []
    with jax.sharding.use_abstract_mesh(mesh_of()):
        assert len(calls_of(attend, X)) == 1


def choices_for(key, device="cpu", **by_direction):
    found = {
        name.replace("_", " "): Measured(choice, "xla", {"xla": 2.0, choice.name: 1.0}, {})
        for name, choice in by_direction.items()
    }
    return Choices(device, jax.__version__, {key: found})


def test_a_choice_for_each_direction(fakes, clock):
    """The value alone costs what the forward choice costs, gradients what theirs cost."""
    fakes(forwards=(1.0, None), backwards=(100.0, None))
    x = jnp.asarray(np.random.default_rng(0).standard_normal(X.shape, np.float32))
    (call,) = calls_of(attend, X)
    directions = {"forward": Choice("forwards"), "gradient of q, k, v": Choice("backwards")}
    directions["gradient of k, q, v"] = directions.pop("gradient of q, k, v")
    choices = choices_for(call.key, **directions)

    def cost(f):
        before = clock.now
        jax.block_until_ready(jax.jit(f)(x))
        return round(clock.now - before, 3)

    gradient = jax.grad(lambda x: (attend(x) ** 2).sum())
    assert (cost(attend), cost(gradient)) == (10, 10)
    wanted = jax.jit(gradient)(x)
    with choices:
        assert (cost(attend), cost(gradient)) == (1, 100)
        np.testing.assert_allclose(jax.jit(gradient)(x), wanted, rtol=1e-6, atol=1e-6)
    with Choices():
        assert (cost(attend), cost(gradient)) == (10, 10)


def test_a_compiled_function_is_traced_again_in_another_context(fakes, clock):
    fakes(fast=(1.0, None))
    (call,) = calls_of(attend, X)
    f, x = jax.jit(attend), jnp.ones(X.shape)
    for choices, seconds in ((Choices(), 10), (choices_for(call.key, forward=Choice("fast")), 1)):
        before = clock.now
        with choices:
            jax.block_until_ready(f(x))
        assert clock.now - before == seconds


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"device": "NVIDIA L4"}, "measured on another kind of device, NVIDIA L4"),
        ({"sources": "0a1b2c3d"}, "measured with other sources of the kernels"),
    ],
)
def test_choices_measured_elsewhere_are_not_used(fakes, clock, capsys, changed, reason):
    fakes(fast=(1.0, None))
    (call,) = calls_of(attend, X)
    choices = dataclasses.replace(choices_for(call.key, forward=Choice("fast")), **changed)
    with Choices.from_json(choices.to_json()):
        jax.block_until_ready(jax.jit(attend)(jnp.ones(X.shape)))
        jax.eval_shape(lambda x: attend(x) + attend(x), X)
    assert clock.now == 10
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith(f"choices are not used: they were {reason}")


def test_a_choice_that_is_refused_is_reported_once(capsys):
    (call,) = calls_of(attend, X)
    with choices_for(call.key, forward=Choice("triton")):
        jax.eval_shape(lambda x: attend(x) + attend(x), X)
    (said,) = capsys.readouterr().err.splitlines()
    assert "triton does not serve a call of attention: the head dimension is 8" in said


def test_one_implementation_everywhere(fakes, clock, capsys):
    fakes(fast=(1.0, None))
    with Choices(everywhere="fast"):
        jax.block_until_ready(jax.jit(attend)(jnp.ones(X.shape)))
        for _ in range(2):
            rotate(jnp.ones((1, 2, 1, 4)), jnp.ones((1, 2, 1, 4)), ROTATION)
    assert clock.now == 1
    assert capsys.readouterr().err.splitlines() == [
        "rope_jax_kernels: fast does not serve a call of rotate: rotate has no implementation of "
        "this name; using the default"
    ]


ROTATION = Rotation(jnp.ones((2, 2)), jnp.ones((1, 2, 2)))
TILE = (("queries", (32, 16, 4, 2)), ("keys", (16, 16, 4, 2)))


def test_choices_survive_a_file(tmp_path):
    choices = choices_for("a key", "NVIDIA H200", forward=Choice("triton", TILE))
    choices.calls["a key"]["forward"].left_out["mosaic"] = "is wrong"
    choices.save(tmp_path / "choices.json")
    again = Choices.load(tmp_path / "choices.json")
    assert (again.device, again.jax, again.calls) == (choices.device, choices.jax, choices.calls)
    assert [path.name for path in tmp_path.iterdir()] == ["choices.json"]


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        Choices().save(tmp_path / "choices.json")
    assert list(tmp_path.iterdir()) == []


def test_choices_remembered_at_once_are_all_kept(tmp_path, monkeypatch):
    """Each call waits for the one before, which is still reading."""
    monkeypatch.setenv("ROPE_JAX_CACHE", str(tmp_path))

    def slowly(path):
        found = _read(path)
        time.sleep(0.05)
        return found

    monkeypatch.setattr("rope_jax_kernels.choices._read", slowly)
    keys = ["one", "two", "three"]
    found = [choices_for(key, "NVIDIA H200", forward=Choice("xla")) for key in keys]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        (path,) = set(pool.map(Choices.remember, found))
    assert set(Choices.load(path).calls) == set(keys)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"format": 2}', '{"format": 1, "device": "x", "jax": "1"}']
)
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json: these are no choices of kernels"):
        Choices.load(tmp_path / "x.json")


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
    own = {"xla": Choice("xla"), "triton": Choice("triton")}
    makes = lambda name: choices_for(call.key, "NVIDIA H200", forward=own[name])
    monkeypatch.setenv("ROPE_JAX_CACHE", str(tmp_path))
    path = makes("xla").remember()
    name = f"nvidia_h200-jax{jax.__version__}-{sources_of_kernels()}.json"
    assert path == tmp_path / "kernels" / name
    assert kernels_of(windows, MAP) == 0
    with makes("triton"):
        assert kernels_of(windows, MAP) == 1
    # What was measured before stays beside what is new.
    other = choices_for("another key", "NVIDIA H200", forward=own["xla"])
    other.remember()
    assert set(Choices.load(path).calls) == {call.key, "another key"}
    # The user's own choices come before those that ship.
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    monkeypatch.setattr("rope_jax_kernels.choices.SHIPPED", shipped)
    makes("triton").save(shipped / path.name)
    assert kernels_of(windows, MAP) == 0
    path.write_text("{")
    assert kernels_of(windows, MAP) == 1
    assert "measured choices are ignored" in capsys.readouterr().err


def test_measured_tiles_of_attention_reach_all_kernels():
    def loss(x):
        # Coordinates, of which the kernels have no gradient, stay constant.
        rotation = Rotation(jnp.ones((14 * 14, 2)), jnp.ones((1, 2, 4)))
        out = attention_qkv(x, pattern=Neighborhood((7, 7)), rotation=rotation)
        return out.astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(mesh_of()):
        (call,) = calls_of(jax.grad(loss), MAP)
    (direction,) = call.directions
    chosen = Choice("triton", (("forward", (32, 32, 2, 3)), *TILE))
    measured = Measured(chosen, "triton", {chosen.name: 1.0}, {})
    choices = Choices("NVIDIA H200", "", {call.key: {direction: measured}})
    with choices, jax.sharding.use_abstract_mesh(mesh_of()):
        jaxpr = str(jax.make_jaxpr(jax.grad(loss))(MAP))
    assert [jaxpr.count(f"num_stages={n}") for n in (1, 2, 3)] == [0, 2, 1]


def test_a_real_kernel_is_compared_and_timed(interpreted, monkeypatch):
    planned = triton.other_tiles
    monkeypatch.setattr(triton, "other_tiles", lambda *arguments: planned(*arguments)[:1])
    x = jax.ShapeDtypeStruct((3, 4, 1, 8), jnp.float32)
    turn = lambda x, freqs: rotate(x, x, Rotation(jnp.ones((4, 1)), freqs))
    calls = calls_of(turn, x, jnp.ones((1, 1, 2)))
    found = only(tune(calls, seconds=100.0, say=pytest.fail))
    other = Choice("triton", (("rows", (256, 1, 1, 8)),)).name
    assert set(found.microseconds) == {"xla", "triton", other}
    assert found.left_out == {}
    assert min(found.microseconds.values()) > 0


def test_without_calls_there_is_nothing_to_tune(interpreted, clock):
    choices, (said,) = measured_by(clock, [])
    assert choices.calls == {}
    assert said.startswith("nothing to tune: no call was recorded.")


def test_a_cpu_has_nothing_to_tune(clock, monkeypatch):
    monkeypatch.delenv("ROPE_JAX_INTERPRET", raising=False)
    choices, said = measured_by(clock, calls_of(attend, X))
    assert choices.calls == {}
    assert said == ['nothing to tune: kernels need a GPU, and this is cpu; "xla" serves every call']
