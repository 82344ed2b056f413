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
    shorter = [result | {"runs": result.get("runs", [])[:-1]} for result in results]
    assert len(pictures.stale(shorter)) == len(pictures.PICTURES)
