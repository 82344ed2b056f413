import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from rope_jax.analysis import plots
from rope_jax.analysis.analyses import image_batches
from rope_jax.commands import analyse as analysis_command
from rope_jax.commands.analyse import main
from rope_jax.runs.loading import load_run
from rope_jax.training.setup import load_split
from rope_jax_kernels import Choices
from tests.refusals import expect_refusal
from tests.small_run import save_run

DIGITS = ["--model=vit_digits", "--options=depth=2,width=48,heads=3"]


@pytest.fixture
def command(tmp_path):
    """Runs a command on a small model; returns its numbers and the names of its pictures."""

    def run(name, *arguments):
        main([name, *arguments, f"--out={tmp_path}"])
        pictures = sorted(path.name for path in tmp_path.glob("*.png"))
        assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
        return json.loads((tmp_path / f"{name}.json").read_text()), pictures

    return run


@pytest.fixture
def figures(monkeypatch):
    """Records the figures that are saved."""
    drawn, save = [], Figure.savefig

    def record(figure, *path, **options):
        drawn.append(figure)
        return save(figure, *path, **options)

    monkeypatch.setattr(Figure, "savefig", record)
    return drawn


def check_panels(figure, crosses, label):
    """A figure has panels with these marked tokens, and one colour bar."""
    panels = [axes.lines[0] for axes in figure.axes if axes.lines]
    assert [tuple(line.get_xydata()[0]) for line in panels] == crosses
    assert figure.axes[-1].get_ylabel().startswith(label)


@pytest.mark.slow
def test_attention_of_files(command, tmp_path):
    for number in range(3):
        image = Image.fromarray(np.full((10, 12, 3), 80 * number, np.uint8))
        image.save(tmp_path / f"{number}.jpg")
    files = [f"--images={tmp_path}", "--count=2", "--batch_size=1"]
    numbers, pictures = command("attention", *DIGITS, *files)
    assert (numbers["images"], numbers["grids"]) == (2, [[4, 4], [4, 4]])
    assert numbers["model"] == "vit_digits with axial_rope"
    assert np.shape(numbers["distance"]) == np.shape(numbers["entropy"]) == (2, 3)
    assert pictures == ["attention_distance.png", "attention_entropy.png"]


def test_a_workdir(command, tmp_path):
    save_run(tmp_path, 2, position="rope_mixed", seed=5)
    numbers, _ = command("maps", str(tmp_path), "--resolution=8x12", "--query=0.1,0.9")
    assert np.shape(numbers["maps"]["layer 1"]) == (4, 6)
    assert numbers["weights"] == f"{tmp_path}, seed 5, step 2"
    save_run(tmp_path / "b", 2, position="rope_mixed", seed=5, eval={"extend": "interpolate"})
    other, _ = command("maps", str(tmp_path / "b"), "--resolution=8x12", "--query=0.1,0.9")
    assert other["maps"] != numbers["maps"]  # the same weights by the rule of its evaluation
    numbers, pictures = command("learned", str(tmp_path))
    assert np.shape(numbers["before"]) == (1, 2, 2, 4)
    np.testing.assert_allclose(numbers["before"], numbers["after"])  # nothing was trained
    assert pictures == ["learned.png", "maps.png"]


def test_runs_are_analysed_with_their_kernels(command, tmp_path, monkeypatch):
    save_run(tmp_path, 2, position="rope_mixed")
    used = []
    record = lambda config, workdir: used.append((config.model.position, workdir)) or Choices()
    monkeypatch.setattr(analysis_command, "kernels_of_run", record)
    command("decay", str(tmp_path))
    assert used == [("rope_mixed", tmp_path)]


def test_images_of_the_test_split(tmp_path):
    save_run(tmp_path, 2)
    loaded = load_run(str(tmp_path))
    batches = [pixels for pixels, _ in image_batches(loaded, None, None, 5, 3)]
    assert [len(batch) for batch in batches] == [3, 2]
    first = load_split(loaded.config, "test", (8, 8)).images[:5]
    np.testing.assert_array_equal(np.concatenate(batches), first)


def test_rotations(command, figures):
    numbers, _ = command("fourier", *DIGITS, "--position=rope_mixed")
    assert list(numbers["maps"]) == ["all layers", "layer 1", "layer 2", "nearest bins"]
    assert numbers["maps"]["all layers"][2][2] == pytest.approx(1)
    check_panels(figures[0], [(2, 2)] * 4, "relative to")
    numbers, pictures = command("decay", *DIGITS)
    assert numbers["score"][0] == pytest.approx(1)
    assert pictures == ["decay.png", "fourier.png"]


def test_positions_and_costs(command, figures, capsys):
    numbers, _ = command("correlation", *DIGITS, "--position=lape(ape)", "--token=6")
    assert numbers["maps"]["layer 1"][1][2] == pytest.approx(1)
    check_panels(figures[0], [(2, 1)] * 2, "cosine similarity")
    schemes = ["--positions", "none", "rope2d", "--image_size=8"]
    numbers, _ = command("costs", "--model=vit_digits", *schemes)
    assert [row["position"] for row in numbers["rows"]] == ["none", "rope2d"]
    assert "operations" in capsys.readouterr().out
    numbers, pictures = command("angles", "--widths=16", "--heads=2")
    assert len(numbers["table31, d=16"]) == 16
    assert pictures == ["angles_16.png", "correlation.png", "costs.png"]


def test_several_models_and_sizes_have_files_of_their_own_and_common_pictures(tmp_path, capsys):
    save_run(tmp_path / "a", 2, position="ape")
    save_run(tmp_path / "b", 2, position="lape(ape)")
    runs, out = [str(tmp_path / "a"), str(tmp_path / "b")], tmp_path / "out"
    main(["joining", *runs, "--count=2", f"--out={out}"])
    main(["correlation", *DIGITS, "--position=ape,lape(ape)", f"--out={out}"])
    main(["attention", runs[0], "--resolution=8,8x12", "--count=2", f"--out={out}"])
    assert {path.name for path in out.glob("*.json")} == {
        *(f"{name}_{x}.json" for name in ("correlation", "joining") for x in ("ape", "lape_ape")),
        *("attention_8_px.json", "attention_8x12_px.json"),
    }
    assert {path.name for path in out.glob("*.png")} >= {
        *("attention.png", "correlation.png", "joining.png", "joining_maps.png"),
    }
    with expect_refusal(capsys, "the same model is named twice"):
        main(["decay", runs[0], runs[0], f"--out={out}"])
    with expect_refusal(capsys, "no learned frequencies"):  # the table of ape is no frequency
        main(["learned", *DIGITS, "--position=rope2d+ape", f"--out={out}"])


@pytest.mark.parametrize(
    ("place", "crosses"),
    [((0.5, 0.5), [(3, 2), (3, 2), (1, 1)]), ((1.0, 0.0), [(0, 3), (0, 3), (0, 1)])],
)
def test_marks_are_in_the_middle_of_tokens(figures, tmp_path, place, crosses):
    """The image is marked as in layer 1; places are in tokens of the map."""
    maps = {"layer 1": np.zeros((4, 6)), "layer 2": np.zeros((2, 3))}
    path = tmp_path / "maps.png"
    plots.overlays(np.zeros((8, 12, 3), np.uint8), maps, path, title="", place=place)
    check_panels(figures[0], crosses, "weight / largest of the map")
    for axes, (rows, columns) in zip(figures[0].axes, [(4, 6), (4, 6), (2, 3)], strict=False):
        assert axes.images[0].get_extent() == [-0.5, columns - 0.5, rows - 0.5, -0.5]
