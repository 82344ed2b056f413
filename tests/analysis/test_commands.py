import json

import numpy as np
import pytest
from PIL import Image

from rope_jax.analysis.__main__ import main

pytestmark = pytest.mark.usefixtures("quick_compiles")
DIGITS = ["--model=vit_digits", "--options=depth=2,width=48,heads=3"]


@pytest.fixture
def command(tmp_path):
    """Runs a command on a small model; returns its numbers and the pictures that it wrote."""

    def run(name, *arguments):
        main([name, *arguments, f"--out={tmp_path}"])
        pictures = sorted(path.name for path in tmp_path.glob("*.png"))
        assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
        return json.loads((tmp_path / f"{name}.json").read_text()), pictures

    return run


def test_attention_of_files(command, tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(3):
        Image.fromarray(np.full((10, 12, 3), 80 * number, np.uint8)).save(tmp_path / "images" / f"{number}.png")
    files = [f"--images={tmp_path / 'images'}"]
    found, pictures = command("attention", *DIGITS, *files, "--count=2", "--batch_size=1")
    assert (found["images"], found["grids"]) == (2, [[4, 4], [4, 4]])
    assert np.shape(found["distance"]) == np.shape(found["entropy"]) == (2, 3)
    assert pictures == ["attention_distance.png", "attention_entropy.png"]
    found, _ = command("maps", *DIGITS, *files, "--resolution=8x12", "--query=0.1,0.9")
    assert np.shape(found["maps"]["layer 2"]) == (4, 6)


def test_rotations(command):
    found, _ = command("fourier", *DIGITS, "--position=rope_mixed")
    assert list(found["maps"]) == ["all layers", "layer 1", "layer 2", "nearest bins"]
    assert found["maps"]["all layers"][2][2] == pytest.approx(1)
    found, _ = command("decay", *DIGITS)
    assert found["score"][0] == pytest.approx(1)
    found, pictures = command("learned", *DIGITS, "--position=rope_mixed")
    assert found["before"] == found["after"]  # of a fresh model
    assert pictures == ["decay.png", "fourier.png", "learned.png"]


def test_positions_and_costs(command, capsys):
    found, pictures = command("correlation", *DIGITS, "--position=lape(ape)", "--token=3")
    assert found["maps"]["layer 1"][0][3] == pytest.approx(1)
    found, pictures = command("costs", "--model=vit_digits", "--positions", "none", "rope2d", "--image_size=8")
    assert [row["position"] for row in found["rows"]] == ["none", "rope2d"]
    found, pictures = command("angles", "--widths=16", "--heads=2")
    assert len(found["table31, d=16"]) == 16
    assert pictures == ["angles_16.png", "correlation.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fourier", *DIGITS, "--position=ape"], "turns nothing by coordinates: use a rotary scheme"),
        (["learned", *DIGITS], "axial_rope does not learn its frequencies"),
        (["learned", *DIGITS, "--position=rope_mixed", "--stage=2"], "--stage=2 is not one of 1 to 1"),
        (["attention", *DIGITS, "--images=x", "--count=0"], "--count=0 must be at least 1"),
        (["maps", *DIGITS, "--images=x.png", "--query=0.5"], "--query=0.5 must be two numbers"),
        (["correlation", "--model=swin_t", "--options=depths=(1,),heads=(2,),width=8"], "a model of stages has a map for each"),
        (["decay", *DIGITS, "--source=timm"], "--source=timm says whose names --weights has"),
        (["attention", *DIGITS], "name --images, a file or a folder"),
        (["decay"], "name either the WORKDIR of a run or a --model"),
        (["decay", "somewhere", "--position=ape"], "--position goes with --model"),
        (["costs", "--model=vit"], "unknown model 'vit'"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message, tmp_path):
    with pytest.raises(SystemExit, match=f"^rope_jax.analysis: .*{message}"):
        main([*arguments, f"--out={tmp_path}"])
