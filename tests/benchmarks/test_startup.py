import json

import pytest

from benchmarks._runner import main


@pytest.mark.slow
@pytest.mark.process
def test_starts_with_empty_and_filled_caches_are_measured(tmp_path):
    out = tmp_path / "startup.json"
    small = ["--model=vit_digits", "--batch=2", "--image-size=8", "--starts=1"]
    assert main(["startup", *small, f"--out={out}"]) == 0
    result = json.loads(out.read_text())
    (empty,), (filled,) = result["first_step_s"].values()
    assert min(empty, filled) > 1  # processes that import jax
    assert result["rows"] == [["empty", *[empty] * 3, 1], ["filled", *[filled] * 3, 1]]
    assert result["note"] == "`vit_digits`, batch 2, 8 px, float32."


@pytest.mark.process
def test_runs_that_end_early_are_explained():
    with pytest.raises(SystemExit, match=r"(?s)before its first step:.*vit_digit"):
        main(["startup", "--model=vit_digit", "--starts=1"])
