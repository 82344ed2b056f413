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
    assert pictures.stale([result]) == ["claims.png", "fashion.png"]
    pictures.draw(pictures.PICTURES[0], result, tmp_path / "images")
    assert pictures.stale([result]) == ["claims.png"]
    with Image.open(tmp_path / "images" / "fashion.png") as image:
        assert image.info[pictures.CHECKSUM].startswith("x.json ")
        assert image.width > 600
    file.write_text(json.dumps(result) + " ")
    assert pictures.stale([result]) == ["claims.png", "fashion.png"]
    assert pictures.stale([]) == ["fashion.png"]  # a picture of no result


@pytest.mark.parametrize("part", ["fashion", "tiny_imagenet"])
def test_a_part_that_has_hardly_begun_has_no_picture(part):
    """One seed of each scheme, and two of a single one."""
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


def colours_of(path):
    assert path.stat().st_size < 100_000
    with Image.open(path) as image:
        assert image.width > 600
        found = image.convert("RGB").getcolors(2**24)
    return {"#{:02x}{:02x}{:02x}".format(*colour) for _, colour in found}


def test_curves_of_another_backbone(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "checksum", lambda _: "x")
    picture = next(x for x in pictures.PICTURES if x.shows == "swin")
    other = [run | {"backbone": "swin"} for run in evidence_result()["runs"]]
    pictures.draw(picture, evidence_result(picture.part, runs=other), tmp_path)
    assert {x.lower() for x in pictures.COLOURS[:4]} <= colours_of(tmp_path / picture.file)


def test_rules_are_drawn_where_a_scheme_has_several_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "checksum", lambda _: "x")
    picture = next(x for x in pictures.PICTURES if x.shows == pictures.RULES)
    result = evidence_result()
    row = {"rule": "none", "resolution": [28, 28], "score": 0.5, "count": 9}
    far = [row | {"rule": rule, "resolution": [56, 56]} for rule in ("none", "ntk", "yarn(beta=4)")]
    for run in result["runs"]:
        if run["position"] == "rope2d":
            run["rules"] = [row, *far]
    assert pictures.shown(picture, result) == ["rope2d"]
    pictures.draw(picture, result, tmp_path)
    first, second, third = (x.lower() for x in pictures.COLOURS[:3])
    colours = colours_of(tmp_path / picture.file)
    assert {first, second} <= colours
    assert third not in colours  # rules with options are not drawn


def test_claims_are_drawn_with_their_verdicts(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "checksum", lambda _: "x")
    picture = next(x for x in pictures.PICTURES if x.shows == pictures.CLAIMS)
    result = evidence_result("fashion")
    found = [(claim.better[1], claim.resolution) for claim in pictures.shown(picture, result)]
    assert found == [("rpb", None), ("rope2d", 16)]  # both models have all seeds
    pictures.draw(picture, result, tmp_path)
    wanted = {pictures.VERDICTS[verdict].lower() for verdict in ("shown", "refuted")}
    assert wanted <= colours_of(tmp_path / picture.file)
    result["settings"]["seeds"] = [0, 1, 2]
    assert pictures.shown(picture, result) == []
