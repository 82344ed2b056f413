import json

import pytest

from docs import make_tables as tables
from experiments._parts import PARTS

ORIGIN = {
    "date": "2030-01-02T03:04:05+00:00",
    "machine": {"device": "Some GPU", "platform": "gpu"},
    "versions": {"jax": "9.9"},
    "file": "experiments/results/x.json",
}
WHERE = "Some GPU, jax 9.9, 2030-01-02, `experiments/results/x.json`"
ON_CPU = {"device": "cpu", "platform": "cpu"}
GOAL = {"value": 1.234, "least": 0.9, "most": 2.0, "count": 300}


def rotary_result(**others):
    times = {"hot": {"xla": 3.0, "triton": 2.0}}
    result = {
        "benchmark": "rotary",
        "settings": {"kernels": ["triton"]},
        "limits": {"launch_us": 2.0, "kernel_launch_us": 2.5, "copy_gb_per_s": 4300.0},
        "rows": [{"precision": "16-32", "direction": "forward", "microseconds": times}],
        "goals": {"K1": GOAL},
    }
    return ORIGIN | result | others


def test_a_block_is_replaced_and_nothing_else():
    text = "before\n<!-- table: rotary -->\nstale\n<!-- end -->\nafter\n"
    once = tables.fill(text, [rotary_result()])
    assert "stale" not in once
    assert "| 16-32 | forward | hot | xla / triton | 1 | 1.50 | 1.50 | 1.50 |" in once
    assert f"a kernel that only stores 2.50 us, a copy moves 4,300 GB/s. {WHERE}." in once
    assert once.startswith("before\n<!-- table: rotary -->\n")
    assert once.endswith("\n<!-- end -->\nafter\n")
    assert tables.fill(once, [rotary_result()]) == once


def test_an_unknown_table_is_refused():
    with pytest.raises(ValueError, match=r"table 'rotari' is unknown; use one of \['digits', "):
        tables.fill("<!-- table: rotari -->\n<!-- end -->\n", [])


def test_tables_without_a_result_name_the_command():
    for name in ("rotary", "models", "startup", "data", "memory"):
        text = tables.TABLES[name]([rotary_result(machine=ON_CPU)])
        assert text == f"No result yet: `python -m benchmarks {name}`.\n"
    assert tables.digits([]) == "No result yet: `python -m experiments digits`.\n"
    assert tables.evidence([]).count("No result yet") == len(PARTS)


def test_goals_show_the_newest_result_that_has_them():
    older = rotary_result(
        date="2029-01-01T00:00:00+00:00", goals={"K1": GOAL | {"value": 1.0}, "K2": GOAL}
    )
    lines = tables.goals([rotary_result(), older]).splitlines()
    assert lines[2].endswith(f" | **1.23** (0.90 to 2.00, 300 sizes) | {WHERE} |")
    assert "| **1.23** (0.90 to 2.00, 300 sizes) | Some GPU, jax 9.9, 2029-01-01, " in lines[3]
    assert lines[4].endswith(" | - |  |")


def test_goals_of_a_few_models_show_each():
    each = {"deit3_b16, 256": 0.8, "swin_t, 256": 0.31}
    goals = {"M4": GOAL | {"value": 0.5, "each": each}, "S1": {"value": 3.0, "slower_percent": 2.5}}
    text = tables.goals([rotary_result(goals=goals)])
    assert "| **0.50** (deit3_b16, 256: 0.80; swin_t, 256: 0.31) |" in text
    assert "| **3.00** (steps +2.5 %) |" in text


def test_digits():
    row = {"resolution": [8, 8], "top1": 0.5, "count": 360}
    runs = [
        {"position": "ape", "seed": seed, "eval": [row | {"top1": 0.5 + seed / 10}]}
        for seed in (0, 1)
    ]
    result = {"benchmark": "digits", "settings": {}, "runs": runs, "cores": 2}
    text = tables.digits([ORIGIN | result])
    assert "| `ape` | 50.0 |" in text
    assert "`ape` with seed 1: 60.0" in text
    assert "\n2 CPU cores, jax 9.9, 2030-01-02, " in text


def model_result(program, file, **others):
    names = ("model", "position", "software", "implementation", "dtype", "batch")
    about = dict(zip(names, ("vit", "ape", "rope_jax", None, "bfloat16", 8), strict=True))
    times = dict.fromkeys(("milliseconds", "low", "high", "images_per_second"), 1.0)
    rest = {"roofline_share": 0.5, "tax_percent": None, "temp_bytes": 1, "program": program}
    result = {
        "benchmark": "models",
        "settings": {"programs": [program], "table": None},
        "limits": {"gemm_tflop_per_s": {"bfloat16": 790.0}, "copy_gb_per_s": 4300.0},
        "rows": [about | times | rest],
        "file": file,
    }
    return ORIGIN | result | others


def test_models_of_one_platform_measured_in_several_runs_are_all_there():
    cpu = model_result("forward", "cpu.json", machine=ON_CPU)
    ours = [
        model_result(*of)
        for of in (("train", "train"), ("forward", "forward"), ("forward", "older"))
    ]
    text = tables.model_tables([cpu, *ours])
    there = [text.find(f"`{name}`") > 0 for name in ("train", "forward", "older", "cpu.json")]
    assert there == [True, True, False, True]
    assert text.index("`forward`") < text.index("cpu.json")


def evidence_result(part="fashion", **others):
    """Two seeds, 0.1 apart, of four schemes; at 16 pixels APE is the best."""
    top1 = {"none": (0.5, 0.3), "rpb": (0.6, 0.4), "ape": (0.55, 0.5), "rope2d": (0.7, 0.4)}
    runs = []
    for position, accuracies in top1.items():
        for seed in (0, 1):
            sides = zip((28, 16), accuracies, strict=True)
            rows = [
                {"resolution": [side, side], "top1": x + seed / 10, "count": 10}
                for side, x in sides
            ]
            about = {"backbone": "vit", "position": position, "seed": seed}
            runs.append(about | {"eval": rows})
    settings = {"part": part, "flags": [], "seeds": [0, 1], "data": "x"}
    result = {"benchmark": "evidence", "settings": settings, "runs": runs, "complete": False}
    return ORIGIN | result | others


def test_evidence_shows_accuracies_and_the_outcome_of_claims():
    text = tables.evidence([evidence_result()])
    all_runs = 2 * len(PARTS["fashion"].models)
    assert f"over seeds. 8 of {all_runs} runs are finished. {WHERE}." in text
    # t of one degree of freedom: 12.706
    assert "| `vit` | `none` | 2 | 55.0 ± 63.5 (28 px) | 16: 35.0 ± 63.5 |" in text
    rpb = "| `vit` with `rpb` above `vit` with `none` | thesis, table 4.1 | +10.0 ± 0.0, shown |"
    assert rpb in text
    rope = "| `vit` with `rope2d` above `vit` with `ape` | Heo et al., figure 4 | "
    assert f"{rope}16 px: -10.0 ± 0.0, refuted |" in text
    assert "Of 2 comparisons: 1 shown, 1 refuted." in text
    assert text.count("No result yet") == len(PARTS) - 1


def test_there_is_no_verdict_before_all_seeds():
    result = evidence_result()
    text = tables.TABLES["verdicts"]([result])
    shown, refuted, rest = text.splitlines()
    assert shown == "- **Shown**: `vit` with `rpb` above `vit` with `none` (+10.0 ± 0.0)."
    what = "`vit` with `rope2d` above `vit` with `ape`"
    assert refuted == f"- **Refuted**: {what} at 16 px (-10.0 ± 0.0)."
    assert f"; {what} at 20 px, at 24 px, at 32 px" in rest
    result["settings"]["seeds"] = [0, 1, 2]
    (text,) = tables.TABLES["verdicts"]([result]).splitlines()
    assert text.startswith("- **Not finished**: `vit` with `rpb` above `vit` with `none`; ")
    evidence = tables.evidence([result])
    assert (
        "| `vit` with `rpb` above `vit` with `none` | thesis, table 4.1 | 2 of 3 seeds |"
        in evidence
    )
    assert "comparisons" not in evidence


def test_the_ranking_has_models_of_all_seeds():
    result = evidence_result()
    for run in result["runs"]:
        first = run["eval"][0]
        others = [first | {"resolution": [side, side]} for side in (20, 24, 32, 40)]
        run["eval"] = [first, *others]
    single = [run | {"position": "lape(ape)"} for run in result["runs"][:1]]
    swin = [run | {"backbone": "swin"} for run in single]  # first, and not what the table is of
    swin[0]["eval"] = [swin[0]["eval"][0] | {"resolution": [32, 32]}]
    result["runs"] = [*swin, *result["runs"], *single]
    text = tables.TABLES["ranking"]([result])
    assert text.startswith("| position | 28 px, as trained | 20 px | 24 px | 32 px | 40 px |")
    assert "| `rpb` |" in text
    assert "lape" not in text
    assert "interval over 2 seeds. " in text


def test_designs_show_every_claim_and_setting_before_there_is_a_result():
    text = tables.TABLES["designs"]([])
    assert "| `vit` with `rpb` above `vit` with `none` | as trained | thesis, table 4.1 |" in text
    parts = "`vit` with `axial_rope(k_rope=8)` as good as `vit` with `axial_rope(k_rope=1)`"
    assert f"| {parts} | as trained | thesis, table 4.3" in text
    rope = "| `vit` with `rope2d` above `vit` with `ape` | 16, 20, 24, 32, 40, 48 | Heo et al., fig"
    assert rope in text
    assert text.count("| CAT, table 4 | after ten epochs 38.9, without the imprint 38.3 |") == 1
    assert "with -0.5 points in place of zero" in text
    assert "| `vit` | `model.name=vit_digits`, " in text
    assert "All: `batch_size=" in text


def test_the_newest_result_of_a_part_counts():
    fashion = [evidence_result(file=file) for file in ("newer.json", "older.json")]
    results = [evidence_result("cifar10"), *fashion]
    assert tables.newest(results, "evidence", part="fashion")["file"] == "newer.json"
    assert tables.newest(results, "evidence", "cpu") is None


def test_the_command_writes_and_checks(tmp_path, monkeypatch, capsys):
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "x.json").write_text(json.dumps(rotary_result()))
    older = rotary_result(date="2029-01-01T00:00:00+00:00", goals={"K1": GOAL | {"value": 9.0}})
    (results / "a.json").write_text(json.dumps(older))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: goals -->\n<!-- end -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "FILES", ("README.md",))
    with pytest.raises(SystemExit, match=r"not up to date \(make tables\): README.md"):
        tables.main(["--check"])
    tables.main([])
    assert "**1.23**" in readme.read_text()
    assert "benchmarks/results/x.json" in readme.read_text()
    tables.main(["--check"])
    assert "all tables are up to date" in capsys.readouterr().out
