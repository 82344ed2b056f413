import json

import pytest

from benchmarks import tables
from benchmarks.__main__ import main

ORIGIN = {
    "date": "2030-01-02T03:04:05+00:00",
    "machine": {"device": "Some GPU", "platform": "gpu"},
    "versions": {"jax": "9.9"},
    "file": "x.json",
}
GOAL = {"value": 1.234, "least": 0.9, "most": 2.0, "count": 300}


def rotary_result(**others):
    row = {"precision": "16-32", "direction": "forward", "microseconds": {"hot": {"xla": 3.0, "triton": 2.0}}}
    limits = {"launch_us": 2.0, "kernel_launch_us": 2.5, "copy_gb_per_s": 4300.0}
    return (
        ORIGIN
        | {"benchmark": "rotary", "settings": {"kernels": ["triton"]}, "limits": limits, "rows": [row], "goals": {"K1": GOAL}}
        | others
    )


def test_a_block_is_replaced_and_nothing_else():
    text = "before\n<!-- table: rotary -->\nstale\n<!-- end -->\nbetween\n<!-- table: files -->\n<!-- end -->\nafter\n"
    once = tables.fill(text, [rotary_result()])
    assert "stale" not in once
    assert "| 16-32 | forward | hot | xla / triton | 1 | 1.50 | 1.50 | 1.50 |" in once
    assert "an empty kernel 2.50 us, a copy moves 4,300 GB/s. Some GPU, jax 9.9, 2030-01-02, `benchmarks/results/x.json`." in once
    assert "| `x.json` | `rotary` | 2030-01-02 | Some GPU | jax 9.9 |" in once
    assert [line for line in once.splitlines() if line in ("before", "between", "after")] == ["before", "between", "after"]
    assert tables.fill(once, [rotary_result()]) == once


def test_an_unknown_table_is_refused():
    with pytest.raises(ValueError, match=r"table 'rotari' is unknown; use one of \['digits', 'schemes'"):
        tables.fill("<!-- table: rotari -->\n<!-- end -->\n", [])


@pytest.mark.parametrize("name", sorted(tables.TABLES.keys() - {"schemes", "benchmarks", "files"}))
def test_what_was_not_run_says_so(name):
    assert tables.NOT_MEASURED in tables.TABLES[name]([])


def test_a_run_on_a_cpu_is_no_measurement_of_kernels():
    on_cpu = rotary_result(machine={"device": "cpu", "platform": "cpu"}, goals={})
    assert tables.NOT_MEASURED in tables.rotary([on_cpu])
    assert "1.23" not in tables.goals([on_cpu])


def test_goals_show_the_newest_result_that_has_them():
    older = rotary_result(date="2029-01-01T00:00:00+00:00", goals={"K1": GOAL | {"value": 1.0}, "K2": GOAL})
    lines = tables.goals([rotary_result(), older]).splitlines()
    assert "| **1.23** (0.90 to 2.00, 300 sizes) | 2030-01-02 | Some GPU, jax 9.9 | `python -m benchmarks rotary` |" in lines[2]
    assert "| **1.23** (0.90 to 2.00, 300 sizes) | 2029-01-01 |" in lines[3]
    assert tables.NOT_MEASURED in lines[4]


def test_digits_and_model_path():
    evaluation = {"resolution": [8, 8], "top1": 0.5, "count": 360}
    runs = [{"position": "ape", "seed": seed, "eval": [evaluation | {"top1": 0.5 + seed / 10}]} for seed in (0, 1)]
    text = tables.digits([ORIGIN | {"benchmark": "digits", "settings": {}, "runs": runs, "cores": 2}])
    assert "| `ape` | 50.0 |" in text
    assert "`ape` with seed 1: 60.0" in text
    row = {"form": "unpack", "pairs": 16, "launches": 1, "units": 6.0, "microseconds": 70.4}
    rows = [row | {"trained": trained} for trained in ("", "fixed", "learned")]
    text = tables.model_path([ORIGIN | {"benchmark": "model_path", "settings": {"pairs": [16]}, "rows": rows, "compiled_for": "Some GPU"}])
    assert "| `unpack` | 1 / 6.0 / 70 us | 1 / 6.0 / 70 us | 1 / 6.0 / 70 us |" in text


def test_the_readmes_goals_and_where_they_are_from():
    text = tables.speed([rotary_result(goals={"K1": GOAL, "S2": {"value": 9.0, "slower_percent": 2.5}})])
    assert "| **1.23** (0.90 to 2.00, 300 sizes) |" in text
    assert "| **9.00** (steps +2.5 %) |" in text
    assert text.count("Some GPU, jax 9.9, 2030-01-02, `benchmarks/results/x.json`.") == 1
    assert tables.NOT_MEASURED in text


def test_goals_of_a_few_models_show_each():
    each = {"deit3_b16, 256": 0.8, "swin_t, 256": 0.31}
    text = tables.speed([rotary_result(goals={"M4": {"value": 0.5, "least": 0.31, "most": 0.8, "count": 2, "each": each}})])
    assert "| **0.50** (deit3_b16, 256: 0.80; swin_t, 256: 0.31) |" in text


def test_models_of_one_platform_measured_in_several_runs_are_all_there():
    row = {"model": "vit", "position": "ape", "software": "rope_jax", "implementation": None, "dtype": "bfloat16", "batch": 8}
    row |= {"milliseconds": 1.0, "low": 1.0, "high": 1.0, "images_per_second": 1.0, "roofline_share": 0.5, "tax_percent": None}
    limits = {"gemm_tflop_per_s": {"bfloat16": 790.0}, "copy_gb_per_s": 4300.0}

    def result(program, file, **others):
        settings = {"programs": [program], "table": None}
        rows = [row | {"program": program, "temp_bytes": 1}]
        return ORIGIN | {"benchmark": "models", "settings": settings, "limits": limits, "rows": rows, "file": file, **others}

    cpu = result("forward", "cpu.json", machine={"device": "cpu", "platform": "cpu"})
    text = tables.models([cpu, result("train", "train.json"), result("forward", "forward.json"), result("forward", "older.json")])
    assert [text.find(file) > 0 for file in ("train.json", "forward.json", "older.json", "cpu.json")] == [True, True, False, True]
    assert text.index("forward.json") < text.index("cpu.json")


def evidence_result(part="vit", **others):
    """Two seeds, 0.1 apart, of three schemes; at 12 pixels APE is the best."""
    rows = lambda top1, small: [{"resolution": [20, 20], "top1": top1, "count": 10}, {"resolution": [12, 12], "top1": small, "count": 10}]
    top1 = {"none": (0.5, 0.3), "rpb": (0.6, 0.4), "ape": (0.55, 0.5), "rope2d": (0.7, 0.4)}
    runs = [
        {"backbone": "vit", "position": position, "seed": seed, "eval": rows(trained + seed / 10, small + seed / 10)}
        for position, (trained, small) in top1.items()
        for seed in (0, 1)
    ]
    settings = {"part": part, "flags": [], "seeds": [0, 1], "data": "x"}
    return ORIGIN | {"benchmark": "evidence", "settings": settings, "runs": runs, "complete": False} | others


def test_evidence_shows_accuracies_and_what_becomes_of_the_claims():
    text = tables.evidence([evidence_result()])
    assert "10,000 images of Fashion-MNIST" in text
    assert "Not all runs are finished. Some GPU, jax 9.9" in text
    assert "| `vit` | `none` | 2 | 55.0 ± 63.5 (20 px) | 12: 35.0 ± 63.5 |" in text  # t of one degree of freedom: 12.706
    assert "| `vit` with `rpb` above `vit` with `none` | thesis, table 4.1 | +10.0 ± 0.0, shown |" in text
    assert "| `vit` with `rope2d` above `vit` with `ape` | Heo et al., figure 4 | 12 px: -10.0 ± 0.0, the opposite |" in text
    assert text.count(tables.NOT_MEASURED) == 4  # the other parts
    short = tables.claims([evidence_result()])
    assert "rpb" in short
    assert "Of 2 comparisons: 1 shown, 1 the opposite; 2 seeds. Some GPU" in short
    assert tables.pictures([evidence_result()]).startswith("![A small ViT")


def test_the_newest_result_of_a_part_counts():
    results = [evidence_result("cat"), evidence_result("vit", file="newer.json"), evidence_result("vit", file="older.json")]
    assert tables.newest(results, "evidence", part="vit")["file"] == "newer.json"
    assert tables.newest(results, "evidence", "cpu") is None


def test_the_benchmarks_are_listed():
    text = tables.benchmarks([])
    assert "| `rotary` | Rotary kernels against XLA" in text
    assert "`tables`" in text
    assert "_record" not in text


def test_the_command_writes_and_checks(tmp_path, monkeypatch, capsys):
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "x.json").write_text(json.dumps(rotary_result()))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: goals -->\n<!-- end -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "FILES", ("README.md",))
    monkeypatch.setattr(tables.read_results, "__defaults__", (results,))
    with pytest.raises(SystemExit, match=r"not up to date \(make tables\): README.md"):
        main(["tables", "--check"])
    assert main(["tables"]) == 0
    assert "**1.23**" in readme.read_text()
    main(["tables", "--check"])
    assert "all tables are up to date" in capsys.readouterr().out
