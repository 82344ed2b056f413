import json
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks
from benchmarks import _goals, _layers, attention
from benchmarks._runner import main
from rope_jax_kernels import Global, Neighborhood, Window
from tests.kernels.attention_pairs import pairs


def layer(pattern, places, direction="forward", forms=("xla+rope", "xla+bias")):
    return _layers.Layer("Swin", pattern, 1, places, 1, 16, direction, forms)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [Window((3, 3), (1, 1)), Neighborhood((3, 3))])
def test_kernel_and_reference_compute_the_same(pattern, monkeypatch):
    monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")
    (qkv,), coords, freqs, bias, _ = layer(pattern, (3, 6)).operands(1)
    bias += jnp.linspace(-1, 1, bias.size).reshape(bias.shape)
    run, results = jax.jit(_layers.attend, static_argnums=(0, 1)), {}
    for form in ("xla", "xla+rope", "xla+bias", "triton", "triton+rope", "triton+bias"):
        results[form] = run(form, pattern, qkv.astype(jnp.float32), coords, freqs, bias)
    for position in ("", "+rope", "+bias"):
        np.testing.assert_allclose(
            results[f"triton{position}"], results[f"xla{position}"], atol=1e-5
        )
    assert np.abs(results["xla"] - results["xla+rope"]).max() > 0.1
    assert np.abs(results["xla"] - results["xla+bias"]).max() > 0.01


@pytest.mark.parametrize(
    "pattern",
    [
        Window((3, 2), (1, 1)),
        Window((7, 2), (3, 0)),
        Neighborhood((3, 2)),
        Neighborhood((3, 5), (2, 2)),
    ],
)
def test_masks_of_other_software_are_the_patterns(pattern):
    tokens = np.arange(6 * 8)
    seen = np.argwhere(_layers.sees(pattern, (6, 8), tokens[:, None], tokens))
    assert sorted(map(tuple, seen)) == sorted(
        (query, key) for query, key, _ in pairs(pattern, (6, 8))
    )


@pytest.mark.slow
def test_the_layers_of_a_loop_compute_their_own():
    problem = layer(Window((2, 2)), (4, 4), "training")
    qkvs, *rest = problem.operands(2)
    step = jax.jit(_layers.pass_of(problem, "xla+rope"))
    together = jax.jit(_layers.loop_of(problem, "xla+rope", rounds=2, steps=3))(qkvs, *rest)
    for (out, gradients), qkv in zip(together, [*qkvs, qkvs[0]], strict=True):
        want, wanted = step(qkv, *rest)
        np.testing.assert_allclose(np.float32(out), np.float32(want), atol=2e-2)
        np.testing.assert_allclose(np.float32(gradients[0]), np.float32(wanted[0]), atol=2e-2)
    shapes = jax.tree.map(jnp.shape, together[0])
    assert shapes == ((1, 4, 4, 1, 16), ((1, 4, 4, 3, 1, 16), {"freqs": (1, 2, 4)}))


def test_the_layers_hold_what_the_goals_are_made_of():
    layers = list(_layers.layers(short=False))
    assert {x.batch for x in layers if x.model == "ViT"} == {64, 128, 256}
    swin = {(x.places, x.direction) for x in layers if x.model == "Swin"}
    assert swin == {
        ((n, n), direction) for n in (56, 28, 14, 7) for direction in ("forward", "training")
    }
    vit = next(x for x in layers if x.model == "ViT")
    assert (vit.shape, vit.pattern) == ((128, 196, 3, 6, 64), Global())
    assert vit.moved_bytes == 4 * 2 * 128 * 196 * 6 * 64
    described = lambda x: {"model": x.model, "direction": x.direction, "traffic_us": 1.0}
    rows = [described(x) | {"microseconds": {"cold": dict.fromkeys(x.forms, 1.0)}} for x in layers]
    of_goals = {goal.name for goal in _goals.GOALS if goal.name.startswith("A")}
    assert set(attention.goals(rows)) == of_goals
    # The layers that are measured first are one for each goal.
    assert set(attention.goals(rows[: attention.TOGETHER])) == of_goals


def test_goals():
    def row(model, direction, **times):
        cold = {name.replace("_", "+"): us for name, us in times.items()}
        return {
            "model": model,
            "direction": direction,
            "traffic_us": 4.0,
            "microseconds": {"hot": {}, "cold": cold},
        }

    rows = [
        row("ViT", "forward", cudnn_rope=20.0, triton_rope=10.0, triton=8.0),
        row(
            "ViT",
            "forward",
            cudnn_rope=80.0,
            triton_rope=20.0,
            triton=1.0,
            mosaic_rope=10.0,
            mosaic=10.0,
        ),
        row("ViT", "training", cudnn_rope=1.0, triton_rope=10.0, triton=1.0),
        row("Swin", "forward", xla_rope=50.0, xla_bias=1.0, triton_rope=10.0),
        row("Swin", "training", xla_rope=1.0, xla_bias=30.0, triton_rope=10.0),
        row("NAT", "forward", cudnn=60.0, triton_rope=6.0),
        {
            "model": "Swin",
            "direction": "forward",
            "traffic_us": 1.0,
            "microseconds": {"hot": {"xla+rope": 1.0, "triton+rope": 9.0}},
        },
    ]
    found = attention.goals(rows)
    values = {
        name: (goal["value"], goal["least"], goal["most"], goal["count"])
        for name, goal in found.items()
    }
    assert values == {
        "A1": (pytest.approx(4.0), 2.0, 8.0, 2),
        "A2": (pytest.approx(1.25**0.5), 1.0, 1.25, 2),
        "A3": (pytest.approx(5.0), 5.0, 5.0, 1),
        "A4": (pytest.approx(3.0), 3.0, 3.0, 1),
        "A5": (pytest.approx(10.0), 10.0, 10.0, 1),
        "A6": (pytest.approx(1.5), 1.5, 1.5, 1),
    }


def small(monkeypatch, count=1):
    """The command measures small layers alone, in groups of one."""
    forms = ("xla+rope", "triton+rope")
    some = [layer(Window((2, 2)), (4, 4 + 2 * i), forms=forms) for i in range(count)]
    monkeypatch.setattr(attention, "layers", lambda short: some)
    monkeypatch.setattr(attention, "TOGETHER", 1)


def test_a_result_tells_where_it_comes_from(tmp_path, capsys, monkeypatch):
    small(monkeypatch)
    assert main(benchmarks, ["attention", "--turns=1", f"--out={tmp_path / 'a.json'}"]) == 0
    result = json.loads((tmp_path / "a.json").read_text())
    about = {"benchmark", "date", "machine", "versions", "settings"}
    assert about | {"limits", "rows", "peers", "hangs", "goals", "left"} <= set(result)
    assert result["left"] == 0
    (row,) = result["rows"]
    assert list(row["microseconds"]["hot"]) == ["xla+rope"]  # interpreted kernels are not timed
    assert row["graphs"] == {"xla+rope": None}
    printed = capsys.readouterr().out
    assert "no GPU" in printed
    assert printed.count("not measured") == 6  # A1 to A6


def test_a_second_call_measures_what_is_missing(tmp_path, monkeypatch):
    small(monkeypatch, count=2)
    limits = {"copy_gb_per_s": 1.0, "launch_us": 1.0}
    monkeypatch.setattr(attention, "machine_limits", lambda turns: limits)
    command = ["attention", "--turns=1", f"--out={tmp_path / 'a.json'}"]
    assert main(benchmarks, [*command, "--limit-s=0"]) == 0  # one layer, or none
    before = json.loads((tmp_path / "a.json").read_text())
    assert before["left"] > 0
    measured = []

    def measure(layer, *_):
        measured.append(layer.places)
        return layer.about | {"microseconds": {}, "traffic_us": 1.0, "left_out": {}}

    monkeypatch.setitem(attention.MEASURES, "rows", measure)
    main(benchmarks, command)
    after = json.loads((tmp_path / "a.json").read_text())
    assert after["left"] == 0
    assert after["rows"][: len(before["rows"])] == before["rows"]
    assert len(measured) == before["left"]
    main(benchmarks, [*command, "--turns=2"])  # another measurement
    assert len(measured) == before["left"] + 2


def test_forms_that_fail_are_left_out_and_hanging_ones_are_named(monkeypatch):
    problem, forever = layer(Window((2, 2)), (4, 4)), threading.Event()
    monkeypatch.setattr(attention, "HANGS_S", 0.2)

    def crash(qkvs, *rest):
        raise MemoryError("too large")

    loops = {"crash": (crash, None), "none": "ValueError: refused", "fine": (lambda *x: x, None)}
    row = attention.measure(problem, loops, 1, {"copy_gb_per_s": 1.0})
    assert row["left_out"] == {"none": "ValueError: refused", "crash": "MemoryError: too large"}
    assert list(row["microseconds"]["hot"]) == ["fine"]
    stuck = loops | {"stuck": (lambda *_: forever.wait(), None)}
    with pytest.raises(attention.Hangs, match="stuck"):
        attention.measure(problem, stuck, 1, {"copy_gb_per_s": 1.0})
    forever.set()


@pytest.mark.slow
def test_what_only_a_gpu_measures_runs(monkeypatch, tmp_path, capsys):
    """In interpret mode, where times mean nothing, with other software that takes no time."""
    monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    limits = {"copy_gb_per_s": 1.0, "launch_us": 1.0}
    monkeypatch.setattr(attention, "machine_limits", lambda turns: limits)
    monkeypatch.setattr(attention, "torch_on_gpu", lambda: True)

    def refused():
        raise MemoryError("too large")

    makers = {"torch": lambda: lambda: 1.0, "another": refused}
    torch = types.SimpleNamespace(attentions=lambda *_: makers)
    monkeypatch.setitem(sys.modules, "benchmarks._torch", torch)
    monkeypatch.setattr(benchmarks, "_torch", torch, raising=False)
    for module in (attention, _layers):
        monkeypatch.setattr(module, "STEPS", 3)
        monkeypatch.setattr(module, "ROUNDS", 1)
    forms = ("xla+rope", "triton+rope", "default+rope", "triton", "cudnn")
    problem = layer(Window((2, 2)), (4, 4), forms=forms)
    monkeypatch.setattr(attention, "layers", lambda short: [problem])
    assert main(benchmarks, ["attention", "--turns=1", f"--out={tmp_path / 'a.json'}"]) == 0
    result = json.loads((tmp_path / "a.json").read_text())
    (row,), (peer,) = result["rows"], result["peers"]
    for temperature in ("hot", "cold"):
        assert set(row["microseconds"][temperature]) == set(forms) - {"cudnn"}
    assert "cuDNN" in row["left_out"]["cudnn"] or "cudnn" in row["left_out"]["cudnn"]
    assert set(peer["microseconds"]["cold"]) == {"triton", "torch"}
    assert peer["left_out"]["another"] == "MemoryError: too large"
    assert set(result["goals"]) == {"A3"}
    assert result["left"] == 0
    assert "cudnn is left out: " in capsys.readouterr().out
