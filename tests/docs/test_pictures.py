from matplotlib.figure import Figure

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


def test_seeds_that_test_a_claim_again_are_left_out(monkeypatch):
    plotted = []
    monkeypatch.setattr(pictures, "plot", lambda _, curves: plotted.append(curves))
    rows = {seed: [{"resolution": [8, 8], "top1": seed / 10, "count": 9}] for seed in (4, 5)}
    runs = [{"position": "ape", "seed": seed, "eval": row} for seed, row in rows.items()]
    pictures.draw_by_scheme(Figure(), {"runs": runs})
    assert plotted == [{"ape": {(8, 8): [40.0]}}]
