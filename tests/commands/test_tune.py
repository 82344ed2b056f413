"""The command `python -m rope_jax.commands.tune`."""

import jax
import pytest

from rope_jax.commands import tune
from rope_jax_kernels import Choices
from rope_jax_kernels.tuning.choices import Choice, Measured

SMALL = ["--model=vit_digits", "--options=depth=2,width=16,heads=1", "--batch=4"]


def test_on_a_cpu_there_is_nothing_to_tune(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ROPE_JAX_CACHE", str(tmp_path))
    tune.main(SMALL)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == 'nothing to tune: kernels need a GPU, and this is cpu; "xla" serves every call'
    assert list(tmp_path.iterdir()) == []


def test_calls_of_evaluation_and_of_training(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)  # calls are those of a single one
    calls = lambda *words: tune.trace_calls(tune.make_parser().parse_args([*SMALL, *words]))
    (call,) = calls("--position=axial_rope")
    assert call.key.startswith("attention_qkv qkv=bfloat16[4,16,3,1,16] pattern=Global()")
    assert (call.count, call.direction) == (2, "forward")
    (call,) = calls("--position=rope_mixed", "--train", "--dtype=float32", "--resolution=8x12")
    assert call.key.startswith("attention_qkv qkv=float32[4,24,3,1,16]")
    assert call.gradients == {"qkv", "rotation.freqs"}


def choices():
    times = {"xla": 40.0, "triton": 10.0, "triton forward=64x32x4x2": 8.0}
    choice = Choice("triton", (("forward", (64, 32, 4, 2)),))
    measured = Measured(choice, "xla", times, {"mosaic": "is wrong: output 0"})
    return Choices("NVIDIA H200", jax.__version__, {"a call": {"forward": measured}})


def test_the_table():
    title, header, _, *rows = tune.table(choices()).splitlines()
    assert title == "a call, forward"
    assert header.split() == ["candidate", "microseconds", "gain"]
    assert [" ".join(row.split()) for row in rows] == [
        "triton forward=64x32x4x2 8.0 5.00x choice",
        "triton 10.0 4.00x",
        "xla 40.0 1.00x default",
        "mosaic - - is wrong: output 0",
    ]
    assert tune.table(Choices()) == "no call has more than one implementation here"


@pytest.mark.parametrize("out", [["--out=new/own.json"], []])
def test_choices_are_saved(tmp_path, monkeypatch, capsys, out):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROPE_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "nothing_to_tune", lambda: None)
    monkeypatch.setattr(tune, "tune", lambda calls, seconds: choices())
    tune.main([*SMALL, *out])
    (written,) = tmp_path.glob("new/own.json" if out else "cache/kernels/*")
    assert Choices.load(written).calls == choices().calls
    shown = written.relative_to(tmp_path) if out else written
    assert f"choices: {shown}\n" in capsys.readouterr().out
