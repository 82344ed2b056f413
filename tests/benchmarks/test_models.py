import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import _models, _timing, models
from benchmarks._runner import call
from rope_jax_kernels import Global, Rotation, Window, attention, attention_qkv

ROW = models.Row(
    "vit_b16",
    "axial_rope",
    "forward",
    "rope_jax",
    None,
    "bfloat16",
    1,
    10.0,
    9.0,
    11.0,
    100.0,
    0.5,
    2.0,
    None,
)
LIMITS = {"gemm_tflop_per_s": {"bfloat16": 790.0}, "copy_gb_per_s": 4300.0}


def row(model, position, speed, **others):
    fixed = {
        "program": "forward",
        "software": "rope_jax",
        "implementation": None,
        "dtype": "bfloat16",
        "batch": 256,
        "temp_bytes": 100,
    }
    times = {
        "milliseconds": 1.0,
        "low": 1.0,
        "high": 1.0,
        "roofline_share": speed / 1000,
        "tax_percent": None,
    }
    return models.Row(
        model=model, position=position, images_per_second=speed, **fixed | times | others
    )


def run(*argv):
    call("models", models.run, argv, "python -m benchmarks models")


def args(**changes):
    """Arguments of `_models.programs`."""
    settings = {"positions": ["none"], "implementations": [None], "depth": 1, "torch": False}
    return types.SimpleNamespace(**settings | changes)


SMALL = [
    *("--models=deit3_ti16", "--depth=1", "--image-size=32"),
    *("--batches=2", "--turns=2", "--passes=1"),
]


@pytest.mark.slow
def test_a_short_run_says_what_it_measured(tmp_path, capsys):
    out = tmp_path / "models.json"
    positions = ["--positions", "none", "rope2d", "rpb(size=3)"]
    forms = [*positions, "--implementations", "None", "jnp", "triton", "--programs", "forward"]
    run(*SMALL, *forms, "--limit-turns=1", f"--out={out}")
    result = json.loads(out.read_text())
    rows = result["rows"]
    keys = [("none", None), ("none", "jnp"), ("rope2d", None), ("rope2d", "jnp")]
    assert [(row["position"], row["implementation"]) for row in rows] == keys
    assert result["goals"] == {}  # of a CPU
    limits = result["limits"]
    assert 1e-3 < limits["gemm_tflop_per_s"]["float32"] < 100
    for row in rows:
        assert row["images_per_second"] == pytest.approx(2e3 / row["milliseconds"])
        assert row["low"] <= row["milliseconds"] <= row["high"]
        assert row["temp_bytes"] > 0
    fastest = 1e3 / models.serial_ms(*models.work("deit3_ti16", 32, 4, depth=1), "float32", limits)
    assert rows[0]["roofline_share"] == pytest.approx(rows[0]["images_per_second"] / fastest)
    assert [row["tax_percent"] for row in rows[:2]] == [0, 0]
    assert rows[3]["tax_percent"] == pytest.approx(
        100 * (rows[3]["milliseconds"] / rows[1]["milliseconds"] - 1)
    )
    printed = capsys.readouterr().out
    assert "rope_jax's deit3_ti16 with rpb(size=3), forward, is skipped: ValueError: " in printed
    refusal = "is skipped: ValueError: implementation='triton' cannot serve"
    assert f"rope_jax's deit3_ti16 with rope2d by triton, forward, {refusal}" in printed
    assert "| deit3_ti16 | `rope2d` | forward | rope_jax | jnp | float32 | 2 |" in printed


@pytest.mark.slow
def test_a_training_step_is_measured(tmp_path, monkeypatch):
    limits = LIMITS | {"gemm_tflop_per_s": {"float32": 1.0}}
    monkeypatch.setattr(models, "machine_limits", lambda turns, dtypes: limits)
    out = tmp_path / "models.json"
    run(*SMALL, "--positions", "none", "--programs", "train", f"--out={out}")
    (row,) = json.loads(out.read_text())["rows"]
    assert row["program"] == "train"
    assert row["milliseconds"] > 0
    assert row["temp_bytes"] > 0


def test_a_run_out_of_time_keeps_what_it_has(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(models, "machine_limits", lambda turns, dtypes: LIMITS)
    run("--limit-s", "-1", f"--out={tmp_path / 'x.json'}")
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == []
    assert "stopped with 2 combinations left" in capsys.readouterr().out


def test_a_second_call_measures_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "machine_limits", lambda turns, dtypes: LIMITS)
    monkeypatch.setattr(models.time, "monotonic", iter(range(100)).__next__)
    measured, out = [], tmp_path / "x.json"
    row = lambda name, program, *_: measured.append(program) or [ROW]
    monkeypatch.setattr(models, "measure", row)
    for limit, left, rows in ((1, 1, 1), (9, 0, 2), (9, 0, 2)):
        run("--limit-s", str(limit), f"--out={out}")
        result = json.loads(out.read_text())
        assert (result["left"], len(result["rows"])) == (left, rows)
    assert measured == ["forward", "train"]


def test_programs_that_do_not_compile_or_run_are_left_out(monkeypatch, capsys):
    class Broken:
        """A program of which some schemes fail."""

        def __init__(self, model, *others):
            self.position = type(model.position).__name__

        def compile(self):
            if self.position == "Learned":
                raise RuntimeError("out of registers\nand more")

        def __call__(self, passes):
            if self.position == "Rope2D":
                raise MemoryError("too large")
            return 1.0

    monkeypatch.setattr(_models, "Program", Broken)
    given = args(positions=["none", "ape", "rope2d"])
    found = _models.programs("deit3_ti16", "forward", jnp.zeros((1, 16, 16, 3)), given)
    assert list(found) == [_models.Form("rope_jax", "none")]
    printed = capsys.readouterr().out
    assert (
        "rope_jax's deit3_ti16 with ape, forward, is skipped: RuntimeError: out of registers\n"
        in printed
    )
    assert (
        "rope_jax's deit3_ti16 with rope2d, forward, is skipped: MemoryError: too large\n"
        in printed
    )


@pytest.mark.slow
def test_the_implementation_of_all_layers_is_chosen_by_name():
    rng = np.random.default_rng(0)
    qkv, bias = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 6, 3, 2, 8), (2, 6, 6))
    )
    rotation = Rotation(
        jnp.asarray(rng.normal(size=(6, 2)), jnp.float32),
        jnp.asarray(rng.normal(size=(2, 2, 2)), jnp.float32),
    )
    terms = {"pattern": Global(), "rotation": rotation, "bias": bias, "scale": 0.5}
    wanted = attention_qkv(qkv, **terms)
    with _models.attention_by("jnp"):
        np.testing.assert_allclose(attention_qkv(qkv, **terms), wanted, atol=2e-6)
        np.testing.assert_allclose(attention(*jnp.moveaxis(qkv, 2, 0), **terms), wanted, atol=2e-6)
        with pytest.raises(ValueError, match="needs global attention, but the pattern is Window"):
            attention(*jnp.zeros((3, 1, 2, 2, 1, 8)), pattern=Window((2, 2)))
    with (
        _models.attention_by("cudnn"),
        pytest.raises(
            ValueError, match="implementation='cudnn' cannot serve this call of attention_qkv"
        ),
    ):
        attention_qkv(qkv, **terms)
    np.testing.assert_array_equal(attention_qkv(qkv, **terms), wanted)


@pytest.mark.parametrize(
    ("name", "speed"),
    [
        ("deit3_s16", 44_200),
        pytest.param("deit3_b16", 15_000, marks=pytest.mark.slow),
        ("swin_t", 34_800),
        pytest.param("swin_b", 13_000, marks=pytest.mark.slow),
        ("nat_mini", 41_400),
    ],
)
def test_the_serial_roofline_is_that_of_the_goals(name, speed):
    """Images per second of an H200 at 790 TFLOP/s and 4.3 TB/s, for which the goals were set."""
    assert 1e3 / models.serial_ms(*models.work(name, 224, 2), "bfloat16", LIMITS) == pytest.approx(
        speed, rel=0.01
    )


def test_matrix_products_keep_the_norm():
    (x,), w = _timing._factors(256, "float32")
    assert float(jnp.linalg.norm(x @ w)) == pytest.approx(float(jnp.linalg.norm(x)), rel=0.05)
    assert x.dtype == w.dtype == jax.dtypes.canonicalize_dtype("float32")


def test_goals_are_ratios_of_the_fastest_forms():
    rows = [
        row("deit3_s16", "none", 1000.0),
        row("deit3_s16", "none", 1100.0, implementation="cudnn"),
        row("deit3_s16", "axial_rope", 1000.0),
        row("deit3_s16", "axial_rope", 900.0, implementation="xla"),
        row("deit3_s16", "rope_mixed", 990.0),
        row("deit3_s16", "rope_mixed", 660.0, software="timm", temp_bytes=None),
        row("deit3_b16", "rope_mixed", 400.0),
        row("deit3_b16", "rope_mixed", 500.0, software="timm", temp_bytes=None),
        row("swin_t", "rpb", 500.0),
        row("swin_t", "axial_rope", 550.0),
        row("swin_t", "axial_rope", 10.0, dtype="float32"),
        row("deit3_s16", "rope_mixed", 300.0, program="train"),
        row(
            "deit3_s16", "rope_mixed", 290.0, program="train", implementation="jnp", temp_bytes=130
        ),
        row("deit3_s16", "rope_mixed", 240.0, program="train", software="timm", temp_bytes=None),
    ]
    found = models.goals(rows)
    assert found["M1"]["each"] == {"deit3_s16, 256": pytest.approx(1.1)}
    assert found["M2"]["each"] == {
        "deit3_s16, 256": pytest.approx(1.5),
        "deit3_b16, 256": pytest.approx(0.8),
    }
    assert found["M2"]["value"] == pytest.approx((1.5 * 0.8) ** 0.5)
    assert (found["M2"]["least"], found["M2"]["most"], found["M2"]["count"]) == (
        pytest.approx(0.8),
        pytest.approx(1.5),
        2,
    )
    assert found["M3"]["each"] == {"swin_t, 256": pytest.approx(1.1)}
    assert found["M4"]["each"] == {
        "deit3_s16, 256": pytest.approx(1.0),
        "swin_t, 256": pytest.approx(0.55),
    }
    assert found["T1"]["value"] == pytest.approx(1.25)
    assert found["T2"]["value"] == pytest.approx(1.3)
    assert models.goals([]) == {}


def test_a_model_that_is_not_there_is_refused_at_once():
    with pytest.raises(SystemExit, match="--models vit_x: unknown"):
        run("--models", "swin_t", "vit_x")


def test_the_tables_of_the_thesis_stand_beside_ours():
    assert [len(models.TABLES[table]) for table in ("4.4", "D.1")] == [13, 6]
    assert models.papers(ROW, "4.4") == "3,519 (FAv2)"
    result = {
        "settings": {"table": "4.4"},
        "limits": LIMITS,
        "rows": [models.dataclasses.asdict(ROW)],
        "goals": {},
    }
    assert "| 100.0 | 10.00 (9.00, 11.00) | +2.0 | 0.50 | - | 3,519 (FAv2) |" in models.table(
        result
    )
    assert "runs at 790 TFLOP/s in bfloat16, a copy moves 4,300 GB/s." in models.table(result)
    for table, names in models.TABLES.items():
        for name in names:
            for position in models.SCHEMES:
                assert (
                    models.papers(
                        models.dataclasses.replace(ROW, model=name, position=position), table
                    )
                    != "-"
                )
