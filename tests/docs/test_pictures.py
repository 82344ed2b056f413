from docs import make_pictures as pictures
from docs.results import read_results


def test_pictures_match_the_results():
    assert pictures.stale(read_results()) == [], "run `make tables`"


def test_outdated_pictures_are_redrawn(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    results = read_results()
    assert len(pictures.stale(results)) == len(pictures.PICTURES)
    pictures.main()
    assert pictures.stale(results) == []
    for result in results:
        if result["benchmark"] in ("evidence", "scenes"):
            result["runs"] = result["runs"][:-1]
    assert len(pictures.stale(results)) == len(pictures.PICTURES)
