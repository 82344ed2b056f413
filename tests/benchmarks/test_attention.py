import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks
from benchmarks import _goals, attention
from benchmarks._runner import main
from rope_jax_kernels import Global, Neighborhood, Window
from tests.kernels.attention_pairs import pairs

pytestmark = pytest.mark.usefixtures("quick_compiles")


def layer(pattern, places, direction="forward", forms=("xla+rope", "xla+bias")):
    return attention.Layer("Swin", pattern, 1, places, 1, 16, direction, forms)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [Window((3, 3), (1, 1)), Neighborhood((3, 3))])
def test_kernel_and_reference_compute_the_same(pattern, monkeypatch):
    monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")
    (qkv,), coords, freqs, bias, _ = layer(pattern, (3, 6)).operands(1)
    bias += jnp.linspace(-1, 1, bias.size).reshape(bias.shape)
    run, results = jax.jit(attention.attend, static_argnums=(0, 1)), {}
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
    seen = np.argwhere(attention.sees(pattern, (6, 8), tokens[:, None], tokens))
    assert sorted(map(tuple, seen)) == sorted(
        (query, key) for query, key, _ in pairs(pattern, (6, 8))
    )


@pytest.mark.slow
def test_each_layer_waits_for_the_one_before_and_computes_its_own():
    problem = layer(Window((2, 2)), (4, 4), "training")
    qkvs, *rest = problem.operands(3)
    step = jax.jit(attention.pass_of(problem, "xla+rope"))
    together = jax.jit(lambda qkvs: attention.one_after_another(step, qkvs, *rest))(qkvs)
    for (out, gradients), qkv in zip(together, qkvs, strict=True):
        want, wanted = step(qkv, *rest)
        np.testing.assert_allclose(np.float32(out), np.float32(want), atol=2e-2)
        np.testing.assert_allclose(np.float32(gradients[0]), np.float32(wanted[0]), atol=2e-2)
    shapes = jax.tree.map(jnp.shape, together[0])
    assert shapes == ((1, 4, 4, 1, 16), ((1, 4, 4, 3, 1, 16), (1, 2, 4), (1, 9)))


def test_the_layers_hold_what_the_goals_are_made_of():
    layers = list(attention.layers(short=False))
    assert {x.batch for x in layers if x.model == "ViT"} == {64, 128, 256}
    swin = {(x.places, x.direction) for x in layers if x.model == "Swin"}
    assert swin == {
        ((n, n), direction) for n in (56, 28, 14, 7) for direction in ("forward", "training")
    }
    vit = next(x for x in layers if x.model == "ViT")
    assert (vit.shape, vit.pattern) == ((64, 196, 3, 6, 64), Global())
    assert vit.moved_bytes == 4 * 2 * 64 * 196 * 6 * 64
    limits = {"copy_gb_per_s": 1000.0}
    described = lambda x: {"model": x.model, "direction": x.direction, "moved_bytes": 1}
    rows = [described(x) | {"microseconds": {"cold": dict.fromkeys(x.forms, 1.0)}} for x in layers]
    assert set(attention.goals(limits, rows)) == {
        goal.name for goal in _goals.GOALS if goal.name.startswith("A")
    }


def test_goals():
    def row(model, direction, moved_bytes=4_000_000, **times):
        cold = {name.replace("_", "+"): us for name, us in times.items()}
        return {
            "model": model,
            "direction": direction,
            "moved_bytes": moved_bytes,
            "microseconds": {"hot": {}, "cold": cold},
        }

    rows = [
        row("ViT", "forward", cudnn_rope=20.0, triton_rope=10.0, triton=8.0),
        row("ViT", "forward", cudnn_rope=80.0, triton_rope=10.0, triton=10.0),
        row("ViT", "training", cudnn_rope=1.0, triton_rope=10.0, triton=1.0),
        row("Swin", "forward", xla_rope=50.0, xla_bias=1.0, triton_rope=10.0),
        row("Swin", "training", xla_rope=1.0, xla_bias=30.0, triton_rope=10.0),
        row("NAT", "forward", cudnn=60.0, triton_rope=6.0),
        {
            "model": "Swin",
            "direction": "forward",
            "moved_bytes": 1,
            "microseconds": {"hot": {"xla+rope": 1.0, "triton+rope": 9.0}},
        },
    ]
    found = attention.goals({"copy_gb_per_s": 1000.0}, rows)
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


def test_a_result_tells_where_it_comes_from(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        attention,
        "layers",
        lambda short: [layer(Window((2, 2)), (4, 4), forms=("xla+rope", "triton+rope"))],
    )
    assert main(benchmarks, ["attention", "--turns=1", f"--out={tmp_path / 'a.json'}"]) == 0
    result = json.loads((tmp_path / "a.json").read_text())
    assert {
        "benchmark",
        "date",
        "machine",
        "versions",
        "settings",
        "limits",
        "rows",
        "goals",
    } <= set(result)
    (row,) = result["rows"]
    assert list(row["microseconds"]["hot"]) == ["xla+rope"]  # interpreted kernels are not timed
    printed = capsys.readouterr().out
    assert "no GPU" in printed
    assert printed.count("not measured") == 6  # A1 to A6
