import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import _timing, models
from rope_jax_kernels import Global, Rotation, Window, attention, attention_qkv
from rope_jax_kernels.attention import api

pytestmark = pytest.mark.usefixtures("quick_compiles")

ROW = models.Row("vit_b16", "axial_rope", "forward", "rope_jax", None, "bfloat16", 1, 10.0, 9.0, 11.0, 100.0, 0.5, 2.0, None)
LIMITS = {"gemm_tflop_per_s": {"bfloat16": 790.0}, "copy_gb_per_s": 4300.0}


def row(model, position, speed, **others):
    fixed = {"program": "forward", "software": "rope_jax", "implementation": None, "dtype": "bfloat16", "batch": 256, "temp_bytes": 100}
    times = {"milliseconds": 1.0, "low": 1.0, "high": 1.0, "roofline_share": speed / 1000, "tax_percent": None}
    return models.Row(model=model, position=position, images_per_second=speed, **fixed | times | others)


def test_a_short_run_says_what_it_measured(tmp_path, capsys):
    out = tmp_path / "models.json"
    small = ["--models", "deit3_ti16", "--depth", "1", "--image-size", "32", "--batches", "2", "--turns", "2", "--passes", "1"]
    small += ["--limit-turns", "1", "--out", str(out)]
    positions = ["--positions", "none", "rope2d", "rpb(size=3)"]
    models.main([*small, *positions, "--implementations", "None", "jnp", "triton", "--programs", "forward"])
    result = json.loads(out.read_text())
    rows = result["rows"]
    keys = [("none", None), ("none", "jnp"), ("rope2d", None), ("rope2d", "jnp")]
    assert [(row["position"], row["implementation"]) for row in rows] == keys
    assert result["goals"] == {}  # of a CPU
    models.main([*small, "--positions", "none", "--programs", "train"])
    rows += json.loads(out.read_text())["rows"]
    assert rows[4]["program"] == "train"
    limits = result["limits"]
    assert set(limits["gemm_tflop_per_s"]) == {"float32"}
    for row in rows:
        assert row["images_per_second"] == pytest.approx(2e3 / row["milliseconds"])
        assert row["low"] <= row["milliseconds"] <= row["high"]
        assert row["temp_bytes"] > 0
    fastest = 1e3 / models.serial_ms(*models.work("deit3_ti16", 32, 4, depth=1), "float32", limits)
    assert rows[0]["roofline_share"] == pytest.approx(rows[0]["images_per_second"] / fastest)
    assert [row["tax_percent"] for row in rows[:2]] == [0, 0]
    assert rows[3]["tax_percent"] == pytest.approx(100 * (rows[3]["milliseconds"] / rows[1]["milliseconds"] - 1))
    printed = capsys.readouterr().out
    assert "rope_jax's deit3_ti16 with rpb(size=3), forward, is left out: ValueError: " in printed
    assert "rope_jax's deit3_ti16 with rope2d by triton, forward, is left out: ValueError: implementation='triton' cannot serve" in printed
    assert "| deit3_ti16 | `rope2d` | forward | rope_jax | jnp | float32 | 2 |" in printed


def test_a_run_out_of_time_keeps_what_it_has(capsys, monkeypatch):
    monkeypatch.setattr(models, "machine_limits", lambda turns, dtypes: LIMITS)
    result = models.run(models.parse(["--limit-s", "0", "--limit-turns", "1"]))
    assert result["rows"] == []
    assert "stopped after 0 of 2 models" in capsys.readouterr().out


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

    monkeypatch.setattr(models, "Program", Broken)
    args = models.parse(["--depth", "1", "--positions", "none", "ape", "rope2d"])
    found = models.programs("deit3_ti16", "forward", jnp.zeros((1, 16, 16, 3)), args)
    assert list(found) == [("rope_jax", "none", None)]
    printed = capsys.readouterr().out
    assert "rope_jax's deit3_ti16 with ape, forward, is left out: RuntimeError: out of registers\n" in printed
    assert "rope_jax's deit3_ti16 with rope2d, forward, is left out: MemoryError: too large\n" in printed


def test_the_implementation_of_all_layers_is_chosen_by_name():
    rng = np.random.default_rng(0)
    qkv, bias = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 6, 3, 2, 8), (2, 6, 6)))
    rotation = Rotation(jnp.asarray(rng.normal(size=(6, 2)), jnp.float32), jnp.asarray(rng.normal(size=(2, 2, 2)), jnp.float32))
    terms = {"pattern": Global(), "rotation": rotation, "bias": bias, "scale": 0.5}
    wanted = attention_qkv(qkv, **terms)
    with models.attention_by("jnp"):
        np.testing.assert_allclose(attention_qkv(qkv, **terms), wanted, atol=2e-6)
        np.testing.assert_allclose(attention(*jnp.moveaxis(qkv, 2, 0), **terms), wanted, atol=2e-6)
        with pytest.raises(ValueError, match="knows attention of all tokens only, and the pattern is Window"):
            attention(*jnp.zeros((3, 1, 2, 2, 1, 8)), pattern=Window((2, 2)))
    with models.attention_by("cudnn"), pytest.raises(ValueError, match="implementation='cudnn' cannot serve this call of attention_qkv"):
        attention_qkv(qkv, **terms)
    np.testing.assert_array_equal(attention_qkv(qkv, **terms), wanted)
    assert set(models.parse(["--implementations", "None", "jnp", *api.ATTENTION]).implementations) == {None, "jnp", *api.ATTENTION}


@pytest.mark.parametrize(
    ("name", "speed"), [("deit3_s16", 44_200), ("deit3_b16", 15_000), ("swin_t", 34_800), ("swin_b", 13_000), ("nat_mini", 41_400)]
)
def test_the_serial_roofline_is_that_of_the_goals(name, speed):
    """Images per second of one H200 at 790 TFLOP/s and 4.3 TB/s, as the goals' levels were chosen by."""
    assert 1e3 / models.serial_ms(*models.work(name, 224, 2), "bfloat16", LIMITS) == pytest.approx(speed, rel=0.01)


def test_the_rate_of_matrix_products_is_measured():
    limits = _timing.machine_limits(1, ["float32"])
    assert 1e-3 < limits["gemm_tflop_per_s"]["float32"] < 100
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
        row("deit3_s16", "rope_mixed", 290.0, program="train", implementation="jnp", temp_bytes=130),
        row("deit3_s16", "rope_mixed", 240.0, program="train", software="timm", temp_bytes=None),
    ]
    found = models.goals(rows)
    assert found["M1"]["each"] == {"deit3_s16, 256": pytest.approx(1.1)}
    assert found["M2"]["each"] == {"deit3_s16, 256": pytest.approx(1.5), "deit3_b16, 256": pytest.approx(0.8)}
    assert found["M2"]["value"] == pytest.approx((1.5 * 0.8) ** 0.5)
    assert (found["M2"]["least"], found["M2"]["most"], found["M2"]["count"]) == (pytest.approx(0.8), pytest.approx(1.5), 2)
    assert found["M3"]["each"] == {"swin_t, 256": pytest.approx(1.1)}
    assert found["M4"]["each"] == {"deit3_s16, 256": pytest.approx(1.0), "swin_t, 256": pytest.approx(0.55)}
    assert found["T1"]["value"] == pytest.approx(1.25)
    assert found["T2"]["value"] == pytest.approx(1.3)
    assert models.goals([]) == {}


def test_a_model_that_is_not_there_is_refused_at_once(capsys):
    with pytest.raises(SystemExit):
        models.parse(["--models", "swin_t", "vit_x"])
    assert "--models vit_x: unknown; rope_jax.list_models() has them all" in capsys.readouterr().err


def test_the_tables_of_the_thesis_stand_beside_ours():
    args = models.parse(["--table", "4.4"])
    assert args.image_size == 224
    assert (len(args.models), args.positions, args.programs) == (13, ["none", "rpb", "axial_rope"], ["forward"])
    assert models.papers(ROW, "4.4") == "3,519 (FAv2)"
    result = {"settings": {"table": "4.4"}, "limits": LIMITS, "rows": [models.dataclasses.asdict(ROW)], "goals": {}}
    assert "| 100.0 | 10.00 (9.00, 11.00) | +2.0 | 0.50 | - | 3,519 (FAv2) |" in models.table(result)
    assert "runs at 790 TFLOP/s in bfloat16, a copy moves 4,300 GB/s." in models.table(result)
    for table, names in models.TABLES.items():
        for name in names:
            for position in models.SCHEMES:
                assert models.papers(models.dataclasses.replace(ROW, model=name, position=position), table) != "-"
