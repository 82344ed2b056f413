import ast
import json
import pathlib
import sys

import pytest

import benchmarks
from benchmarks import cpu
from benchmarks._runner import main

ROOT = pathlib.Path(__file__).parents[2]
SHORT = ["--turns=1", "--seconds=0.01"]


def stand_in(folder, parameters):
    """An interpreter that runs any script as if each step took a second."""
    path = folder / "python"
    text = f"#!{sys.executable}\nimport sys\nprint({parameters}, flush=True)\n"
    path.write_text(text + "for line in sys.stdin: print(float(line), flush=True)\n")
    path.chmod(0o755)
    return f"--torch={path}"


@pytest.mark.process
def test_both_take_steps_in_turns(tmp_path):
    out = tmp_path / "x.json"
    argv = ["cpu", *SHORT, stand_in(tmp_path, 302122), f"--out={out}"]
    assert main(benchmarks, [*argv, "--", "batch_size=32"]) == 0
    result = json.loads(out.read_text())
    (ours, rate, *_), (peer, *of_peer) = result["rows"]
    assert (ours, peer) == ("rope_jax", "eager PyTorch")
    assert of_peer[:2] == ["32", "32 to 32"]
    seconds = result["seconds_per_image"]["rope_jax"]
    assert float(rate.replace(",", "")) == pytest.approx(1 / seconds[0], abs=1)
    assert of_peer[2].startswith(f"{1 / 32 / seconds[0]:.2f} (")
    assert result["note"].startswith("`digits`, batch_size=32, ")


@pytest.mark.process
def test_another_model_is_not_compared(tmp_path):
    with pytest.raises(SystemExit, match="the models differ"):
        main(benchmarks, ["cpu", *SHORT, stand_in(tmp_path, 7)])
    with pytest.raises(SystemExit, match="rope_mixed"):
        main(benchmarks, ["cpu", stand_in(tmp_path, 7), "--", "model.position=ape"])


def test_ratios_are_of_times_within_a_turn():
    (_, ours), (_, peer) = [
        (row[0], row[1:])
        for row in cpu.table_rows({cpu.OURS: [1.0, 2.0, 8.0], cpu.PEER: [1.5, 3.0, 8.0]})
    ]
    assert ours[2] == ""
    assert peer[2] == "1.50 (1.25 to 1.50)"


def test_the_peer_has_the_recipe_s_model_and_optimizer():
    asked = cpu.peer_arguments(cpu.make_config("digits", ["batch_size=64", "optim.clip_norm=None"]))
    assert (asked["width"], asked["depth"], asked["image_size"], asked["batch"]) == (96, 4, 8, 64)
    assert (asked["learning_rate"], asked["clip_norm"]) == (3e-3, None)


def test_the_peer_runs_where_only_torch_is_installed():
    tree = ast.parse((ROOT / "benchmarks/_torch_vit.py").read_text())
    names = {alias.name for x in ast.walk(tree) if isinstance(x, ast.Import) for alias in x.names}
    names |= {x.module for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"torch"}
