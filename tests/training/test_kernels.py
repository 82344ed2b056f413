"""The setting `kernels`: measured at the start, kept in the workdir, and used by a resumed run."""

import dataclasses
import shutil
import sys
import types
from unittest import mock

import jax
import pytest

from rope_jax.config import ConfigError, resolve
from rope_jax.training import kernels
from rope_jax.training.signals import Interrupted
from rope_jax.training.trees import tree_hash
from rope_jax_kernels import Choices, dispatch
from rope_jax_kernels.attention import reference
from rope_jax_kernels.tuning.choices import Choice, Measured
from tests.training.recipe import final_state, run, start

SHORT = {"epochs": 0.5, "checkpoint_every": 3, "eval__resolutions": ()}  # 6 steps


@pytest.fixture
def other_kernel(monkeypatch):
    """A second implementation of attention with other bits; returns the shapes traced."""
    monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")
    traced = []

    def attention_qkv(qkv, **terms):
        traced.append(qkv.shape)
        return reference.attention_qkv(qkv * 1.0001, **terms)

    module = types.ModuleType("rope_jax_kernels.other")
    module.attention_qkv, module.refusal = attention_qkv, lambda *_, **__: None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = {"xla": "attention.reference", "triton": "other"}
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "attention_qkv", names)
    return traced


def prefer(monkeypatch, name):
    """Installs a tuner that chooses one implementation for every call; returns the calls."""
    tuned = []

    def tune(calls, say):
        tuned.extend(calls)
        measured = Measured(Choice(name), "xla", {"xla": 2.0, name: 1.0}, {})
        return Choices("cpu", "", {call.key: {call.direction: measured} for call in calls})

    monkeypatch.setattr(kernels, "tune", tune)
    return tuned


@pytest.mark.slow
def test_resumed_runs_use_the_choices_of_their_workdir(tmp_path, monkeypatch, other_kernel):
    """They end in the same bits, even if a new measurement would choose differently."""
    tuned = prefer(monkeypatch, "triton")
    run(tmp_path, **SHORT)
    (call,) = tuned
    assert call.key.startswith("attention_qkv qkv=float32[120,16,3,1,16] pattern=Global()")
    assert call.gradients == {"qkv", "rotation.freqs"}
    assert (120, 16, 3, 1, 16) in other_kernel
    uninterrupted = tree_hash(final_state(tmp_path, **SHORT))
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    tuned = prefer(monkeypatch, "xla")
    other_kernel.clear()
    run(tmp_path, **SHORT)
    assert (120, 16, 3, 1, 16) in other_kernel
    assert tuned == []
    assert tree_hash(final_state(tmp_path, **SHORT)) == uninterrupted


@pytest.fixture(scope="module")
def initial_run():
    """A run before its first step."""
    return start()[:2]


def choose(initial_run, workdir, **settings):
    setup, state = initial_run
    setup = dataclasses.replace(setup, config=dataclasses.replace(setup.config, **settings))
    return kernels.choices_for_training(setup, state, workdir)


def test_signals_but_not_errors_in_measurements_stop_a_run(
    initial_run, tmp_path, monkeypatch, other_kernel, capsys
):
    errors = [Interrupted("SIGTERM"), RuntimeError("out of memory")]
    monkeypatch.setattr(kernels, "tune", mock.Mock(side_effect=errors))
    with pytest.raises(Interrupted):
        choose(initial_run, tmp_path)
    assert not list(tmp_path.iterdir())
    assert choose(initial_run, tmp_path).calls == {}
    assert "could not be measured (RuntimeError('out of mem" in capsys.readouterr().err


def test_all_processes_trace_but_only_the_first_measures(
    initial_run, tmp_path, monkeypatch, other_kernel
):
    """A batch on all devices requires all processes."""
    tuned, traced = prefer(monkeypatch, "triton"), []
    sent = iter(["", Choices("cpu", "of the first").to_json()])
    monkeypatch.setattr(kernels, "trace_step", lambda *_: traced.append("step") or [])
    monkeypatch.setattr(kernels, "decide_by_first", lambda choose: next(sent))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert choose(initial_run, tmp_path).jax == "of the first"
    assert (traced, tuned) == (["step"], [])
    assert list(tmp_path.iterdir()) == []


def test_evaluations_use_the_choices_of_the_run(tmp_path):
    """They read nothing from the cache folder if the run has no choices."""
    run_kernels = lambda **settings: kernels.kernels_of_run(resolve(settings), tmp_path)
    assert (run_kernels().calls, run_kernels().everywhere) == ({}, None)
    Choices("cpu", calls={"a call": {}}).save(kernels.choices_file(tmp_path))
    assert run_kernels().calls == {"a call": {}}
    assert run_kernels(kernels="xla").everywhere == "xla"
    with kernels.kernels_of_run(None, None) as active:  # a model without a run
        assert active is None


def test_a_damaged_file_stops_the_run(initial_run, tmp_path):
    (kernels.choices_file(tmp_path)).write_text('{"format": 1')
    with pytest.raises(ConfigError, match=r"kernels_cpu\.json .* delete it to measure"):
        choose(initial_run, tmp_path)


# From a workdir of a version without separate choices for training and evaluation.
EARLIER = """{"format": 1, "device": "cpu", "jax": "0.11.2", "sources": "0a1b2c3d", "calls": {
"attention q=float32[3,5,1,8] pattern=Global()": {"gradient of k, q, v": {
"choice": {"implementation": "triton", "tile": [["forward", [64, 32, 4, 2]]]},
"default": "xla", "microseconds": {"xla": 2.0}, "left_out": {}}}}}"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("kernels_nvidia_l4.json", "are for another kind of device"),
        ("kernels_cpu.json", "measured with other sources of the kernels"),
    ],
)
def test_unusable_choices_are_measured_again(
    initial_run, tmp_path, monkeypatch, other_kernel, capsys, name, reason
):
    """Those of another device stay in the workdir, for a run that returns to it."""
    tuned = prefer(monkeypatch, "triton")
    (tmp_path / name).write_text(EARLIER)
    choices = choose(initial_run, tmp_path)
    assert (len(tuned), choices.misfit()) == (1, None)
    assert reason in capsys.readouterr().err
    assert Choices.load(kernels.choices_file(tmp_path)).calls == choices.calls
    assert {path.name for path in tmp_path.iterdir()} == {name, "kernels_cpu.json"}


@pytest.mark.parametrize(
    ("setting", "everywhere", "interpreted"),
    [("default", None, True), ("xla", "xla", True), ("tuned", None, False)],
    ids=["default", "xla", "tuned on a CPU"],
)
def test_cases_without_measurements(
    initial_run, tmp_path, monkeypatch, other_kernel, setting, everywhere, interpreted
):
    tuned = prefer(monkeypatch, "triton")
    monkeypatch.setenv("ROPE_JAX_INTERPRET", "1" if interpreted else "")
    choices = choose(initial_run, tmp_path, kernels=setting)
    assert (choices.calls, choices.everywhere, tuned) == ({}, everywhere, [])
    assert list(tmp_path.iterdir()) == []
