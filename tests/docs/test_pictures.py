from PIL import Image

from docs import make_pictures as pictures
from docs.results import read_results


def test_the_pictures_are_of_the_results_that_are_there():
    assert pictures.stale(read_results()) == [], "run `make tables`"


def test_pictures_of_other_results_are_drawn_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    results = read_results()
    assert len(pictures.stale(results)) == len(pictures.PICTURES)
    pictures.main()
    assert pictures.stale(results) == []
    for path in tmp_path.iterdir():
        assert path.stat().st_size < 100_000
        with Image.open(path) as image:
            found = {"#{:02x}{:02x}{:02x}".format(*x) for _, x in image.convert("RGB").getcolors()}
        assert {colour.lower() for colour in pictures.COLOURS[:2]} <= found  # curves, or verdicts
    for result in results:
        if result["benchmark"] == "evidence":
            result["runs"] = result["runs"][:-1]
    assert len(pictures.stale(results)) == len(pictures.PICTURES)
