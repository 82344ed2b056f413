import concurrent.futures
import json

import jax
import numpy as np
import pytest

from benchmarks import _layers, _rotations, _timing, speed
from benchmarks._model_shapes import LAYERS
from benchmarks._runner import main

LIMITS = {"copy_gb_per_s": 1000.0, "launch_us": 2.0}


def make_form(*results, us=1.0):
    """A maker of a form with these results and this time."""
    return lambda: lambda: ([np.float32([x]) for x in results], lambda: us)


def measure(case):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        forms = {name: pool.submit(make) for name, make in case.makers.items()}
        return speed.measure(case, forms, 1, LIMITS)


def make_row(group, case="1", **times):
    """A row of a result; "_" represents the plus in the name of a form."""
    times = {name.replace("_", "+", 1): us for name, us in times.items()}
    return {"group": group, "case": case, "microseconds": times, "left_out": {}}


def test_cases_cover_the_thesis_and_models():
    sizes = list(_rotations.sizes())
    assert len({(case.group, case.name) for case in sizes}) == 300 * 3 * 2
    attention = list(_layers.attention(small=False))
    assert len({(case.group, case.name) for case in attention}) == 2 * (3 + 4 + 1) + 1
    swin = next(x for x in attention if x.name == "swin_t_1, 128 images")
    assert swin.moved_bytes == 4 * 2 * 128 * 56 * 56 * 3 * 32


@pytest.mark.slow
def test_kernels_match_references(monkeypatch):
    monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")
    cases = [*_rotations.sizes(small=True), *_layers.attention(small=True)]
    for case in [*cases[:6], *(x for x in cases if x.group.endswith("t, forward"))]:
        make_row = measure(case)
        others = {"cudnn", "cudnn+rope", "cudnn+all", "unpack+rope", "mosaic", "mosaic+rope"}
        assert set(make_row["left_out"]) <= others, make_row
        assert [name for name in make_row["microseconds"] if name.startswith("triton")]


def test_wrong_and_failing_forms_are_excluded():
    def refuse():
        raise ValueError("it needs a GPU\nand more")

    makers = {
        "xla": make_form(1, 4, us=5.0),
        "triton": make_form(1, 4.01),
        "ours": make_form(1, 4.5),
    }
    makers |= {"eager": make_form(1, np.nan), "natten": make_form(1), "mosaic": refuse}
    makers |= {"torch": lambda: refuse, "xla+rope": make_form(2, 8), "timm": make_form(us=3.0)}
    result = measure(_timing.Case("some", "small", makers, moved_bytes=10**6))
    assert result["microseconds"] == {"xla": 5.0, "triton": 1.0, "xla+rope": 1.0, "timm": 3.0}
    assert result["left_out"] == {
        "ours": "wrong by 0.12 of the largest element",
        "eager": "wrong by nan of the largest element",
        "natten": "ValueError: zip() argument 2 is longer than argument 1",
        "mosaic": "ValueError: it needs a GPU",
        "torch": "ValueError: it needs a GPU",
    }
    assert result["copy_us"] == 1.0


def test_a_training_layer_returns_its_gradients():
    layer = LAYERS["vit_s"]
    shapes = jax.eval_shape(lambda: _layers.operands(layer, 1, 1))
    for name, learned in (("xla+rope", {"freqs": shapes[2].shape}), ("xla", {})):
        step = _layers.make_step(layer.pattern, name, "training")
        out, (qkv, others) = jax.eval_shape(step, shapes[0][0], *shapes[1:])
        assert (out.shape, qkv.shape) == ((1, 196, 6, 64), (1, 196, 3, 6, 64))
        assert {name: x.shape for name, x in others.items()} == learned


def test_a_finished_row_is_not_measured_again(tmp_path, capsys):
    def run(*options):
        argv = ["speed", "--parts", "rotation", "--turns=1", f"--out={tmp_path / 'x.json'}"]
        assert main([*argv, *options]) == 0
        return json.loads((tmp_path / "x.json").read_text())["measured"]

    first = run("--only=16-16, forward, 1 x")
    assert [set(make_row["microseconds"]) for make_row in first] == [{"xla"}]
    assert "triton is left out: ValueError" in capsys.readouterr().out
    second = run("--only=16-16, forward")
    assert second[:1] == first
    assert [make_row["case"] for make_row in second] == ["1 x 3 x 7x7 x 32", "2 x 3 x 7x7 x 32"]
    assert run("--only=16-16, forward") == second
    assert len(run("--only=16-16, forward, 1 x", "--turns=2")) == 1  # another measurement


@pytest.mark.slow
@pytest.mark.parametrize("part", ["attention", "models"])
def test_the_other_parts_run(part, tmp_path):
    out = tmp_path / "x.json"
    assert main(["speed", "--parts", part, "--turns=1", f"--out={out}"]) == 0
    result = json.loads(out.read_text())
    for make_row in result["measured"]:
        assert any(name.startswith("ours") for name in make_row["microseconds"]), make_row
        assert all("GPU" in x or "cuDNN" in x for x in make_row["left_out"].values()), make_row
    assert {"copy_gb_per_s", "launch_us"} <= set(result["limits"])
    assert result["columns"][1] == "form / ours"


def test_ratios_compare_with_the_fastest_kernel_of_a_position():
    rows = [
        make_row(
            "a", xla=8.0, triton=2.0, mosaic=4.0, ours_rope=4.0, cudnn_rope=8.0, cudnn_all=9.0
        ),
        make_row("a", xla=2.0, triton=4.0, mosaic=1.0),
        make_row("b", xla=3.0),
    ]
    assert speed.ratios(rows) == [
        ["a", "xla", 2, pytest.approx(8**0.5), 2.0, 4.0],
        ["a", "cudnn+rope", 1, 2.0, 2.0, 2.0],
    ]
