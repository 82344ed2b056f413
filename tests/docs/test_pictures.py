import json

import pytest
from PIL import Image

from docs import make_pictures as pictures
from docs import make_tables as tables
from tests.docs.test_tables import evidence_result


def test_the_pictures_are_of_the_results_that_are_there():
    assert pictures.stale(tables.read_results()) == [], "run `make tables`"
    for path in pictures.FOLDER.glob("*.png"):
        assert path.stat().st_size < 100_000


def test_a_picture_belongs_to_its_result(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    monkeypatch.setattr(pictures, "FOLDER", tmp_path / "images")
    file = tmp_path / "experiments" / "results" / "x.json"
    file.parent.mkdir(parents=True)
    result = evidence_result()
    file.write_text(json.dumps(result))
    assert pictures.stale([result]) == ["resolutions.png"]
    pictures.draw(pictures.PICTURES[0], result, tmp_path / "images")
    assert pictures.stale([result]) == []
    with Image.open(tmp_path / "images" / "resolutions.png") as image:
        assert image.info[pictures.CHECKSUM].startswith("x.json ")
        assert image.width > 600
    file.write_text(json.dumps(result) + " ")
    assert pictures.stale([result]) == ["resolutions.png"]
    assert pictures.stale([]) == ["resolutions.png"]  # a picture of no result


@pytest.mark.parametrize("part", ["vit", "fashion", "backbones", "tiny_imagenet"])
def test_a_part_that_has_hardly_begun_has_no_picture(part):
    """One seed of each scheme, and two of a single one where points of a backbone need all."""
    runs = [
        run | {"backbone": "swin"}
        for run in evidence_result()["runs"]
        if run["seed"] == 0 or run["position"] == "none"
    ]
    there = [
        picture
        for picture in pictures.PICTURES
        if pictures.result_of(picture, [evidence_result(part, runs=runs)])
    ]
    assert [picture.file for picture in there] == (
        ["tiny_imagenet_swin.png"] if part == "tiny_imagenet" else []
    )


@pytest.mark.parametrize("name", ["backbones.png", "tiny_imagenet_swin.png"])
def test_pictures_of_other_parts(name, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "checksum", lambda _: "x")
    picture = next(x for x in pictures.PICTURES if x.file == name)
    runs = []
    for backbone in ("vit", "swin", "nat"):
        schemes = {
            "none": "none",
            "rpb": "rpb",
            "axial": "axial_rope" if picture.part == "backbones" else "axial_rope(k_rope=2)",
        }
        for run in evidence_result()["runs"]:
            if scheme := schemes.get("axial" if run["position"] == "rope2d" else run["position"]):
                runs.append(run | {"backbone": backbone, "position": scheme})
    pictures.draw(picture, evidence_result(picture.part, runs=runs), tmp_path)
    with Image.open(tmp_path / name) as image:
        assert len(image.convert("RGB").getcolors(2**24)) > 10  # more than the frame
    assert (tmp_path / name).stat().st_size < 100_000


def test_claims_are_drawn_with_their_verdicts(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "checksum", lambda _: "x")
    picture = next(x for x in pictures.PICTURES if x.shows == pictures.CLAIMS)
    result = evidence_result("fashion")
    found = [(claim.better[1], claim.resolution) for claim in pictures.shown(picture, result)]
    assert found == [("rpb", None), ("rope2d", 20)]  # both models have two seeds at this size
    pictures.draw(picture, result, tmp_path)
    with Image.open(tmp_path / picture.file) as image:
        assert image.width > 600
        colours = {
            "#{:02x}{:02x}{:02x}".format(*x[1]) for x in image.convert("RGB").getcolors(2**24)
        }
    assert pictures.VERDICTS["shown"].lower() in colours
