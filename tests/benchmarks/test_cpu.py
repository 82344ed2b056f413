import ast
import json
import pathlib
import sys

import pytest

from benchmarks import cpu
from benchmarks._runner import main

ROOT = pathlib.Path(__file__).parents[2]
SHORT = ["--turns=1", "--seconds=0.01"]


def stand_in(folder, parameters):
    """Writes an interpreter that runs any script as if each step took a second."""
    path = folder / "python"
    text = f"#!{sys.executable}\nimport sys\nprint({parameters}, flush=True)\n"
    path.write_text(text + "for line in sys.stdin: print(float(line), flush=True)\n")
    path.chmod(0o755)
    return f"--torch={path}"


@pytest.mark.process
def test_the_two_libraries_take_turns(tmp_path):
    out = tmp_path / "x.json"
    argv = ["cpu", *SHORT, stand_in(tmp_path, 302122), f"--out={out}"]
    assert main([*argv, "--", "batch_size=32"]) == 0
    result = json.loads(out.read_text())
    (name, rate, *_), (peer, *peer_cells) = result["rows"]
    assert (name, peer) == ("rope_jax", "eager PyTorch")
    assert peer_cells[:2] == ["32", "32 to 32"]
    seconds = result["seconds_per_image"]["rope_jax"]
    assert float(rate.replace(",", "")) == pytest.approx(1 / seconds[0], abs=1)
    assert peer_cells[2].startswith(f"{1 / 32 / seconds[0]:.2f} (")
    assert result["note"].startswith("`digits`, batch_size=32, ")


@pytest.mark.process
def test_different_models_are_not_compared(tmp_path):
    with pytest.raises(SystemExit, match="the models differ"):
        main(["cpu", *SHORT, stand_in(tmp_path, 7)])
    with pytest.raises(SystemExit, match="rope_mixed"):
        main(["cpu", stand_in(tmp_path, 7), "--", "model.position=ape"])


def test_ratios_compare_times_within_a_turn():
    (_, library_cells), (_, peer_cells) = [
        (row[0], row[1:])
        for row in cpu.table_rows({cpu.OURS: [1.0, 2.0, 8.0], cpu.PEER: [1.5, 3.0, 8.0]})
    ]
    assert library_cells[2] == ""
    assert peer_cells[2] == "1.50 (1.25 to 1.50)"


def test_the_peer_has_the_recipes_model_and_optimizer():
    request = cpu.peer_arguments(
        cpu.make_config("digits", ["batch_size=64", "optim.clip_norm=None"])
    )
    assert (request["width"], request["depth"], request["image_size"], request["batch"]) == (
        96,
        4,
        8,
        64,
    )
    assert (request["learning_rate"], request["clip_norm"]) == (3e-3, None)


def test_the_peer_needs_only_torch():
    tree = ast.parse((ROOT / "benchmarks/_torch_vit.py").read_text())
    names = {alias.name for x in ast.walk(tree) if isinstance(x, ast.Import) for alias in x.names}
    names |= {x.module for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"torch"}
