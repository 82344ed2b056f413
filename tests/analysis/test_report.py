import html
import json
import re

import numpy as np
import pytest

from rope_jax import config as cfg
from rope_jax.analysis import comparison_page
from rope_jax.analysis.comparison import score
from rope_jax.analysis.intervals import student, wilson
from rope_jax.commands import report
from rope_jax.evaluate import add_evaluation, curves, write_results
from rope_jax.names import plugins
from tests.refusals import expect_refusal
from tests.small_run import save_run


def rows(*pairs, dataset="digits"):
    shared = {"dataset": dataset, "split": "test", "count": 360, "protocol": "as it is"}
    return [shared | {"resolution": list(size), "top1": top1, "top5": 1.0} for size, top1 in pairs]


def write_config(folder, position, model="vit_digits", options="", **settings):
    identity = {"name": model, "position": position, "options": options}
    config = cfg.resolve({"model": identity} | settings)
    (folder / "config.json").write_text(cfg.to_json(config))


def workdir(folder, position, results, *, seed=0, model="vit_digits", losses=()):
    folder.mkdir(parents=True)
    write_config(folder, position, model, seed=seed)
    write_results(folder, 1, results)
    lines = [
        {"step": step, "loss": loss, "images_per_second": 100.0 + step}
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


class Page:
    """A report: its HTML, its text with a line for each tag, and the rows of all tables."""

    def __init__(self, folder):
        self.html = (folder / "report.html").read_text()
        self.text = html.unescape(re.sub("<.*?>", "\n", self.html))
        rows = re.findall("<tr>.*?</tr>", self.html)
        self.rows = [[_text(cell) for cell in re.findall("<t[hd].*?</t[hd]>", row)] for row in rows]


def _text(cell):
    return " ".join(html.unescape(re.sub("<.*?>", " ", cell)).split())


def test_the_report_has_a_table_a_picture_and_a_page(tmp_path, capsys):
    a = workdir(tmp_path / "a", "ape", rows(((8, 8), 0.9), ((8, 12), 0.5)), losses=(2.0, 1.0))
    b = workdir(tmp_path / "b", "rope2d", rows(((8, 8), 0.95), ((16, 16), 0.7)))
    c = workdir(tmp_path / "c", "rope2d", rows(((8, 8), 0.85), ((16, 16), 0.6)), seed=1)
    report.main([str(a), str(b), str(c)])
    table = (tmp_path / "comparison.txt").read_text()
    assert [line.split() for line in table.splitlines()] == [
        ["position", "8x8", "8x12", "16x16"],
        ["--------", "----", "----", "-----"],
        ["ape", "90.0", "50.0", "-"],
        ["rope2d", "90.0", "-", "65.0"],
        [],
        ["difference", "from", "ape", "in", "percentage", "points", "[95", "%", "interval]"],
        [],
        ["position", "8x8"],
        ["--------", "-----------------"],
        ["rope2d", "+5.0", "[+1.1,", "+9.0]"],  # only seed 0 has a run of both
    ]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "report.html" in capsys.readouterr().out
    page = Page(tmp_path)
    pictures = re.findall('<img src="data:image/png;base64,[^"]*" alt="[^"]{21,}">', page.html)
    assert len(pictures) == page.html.count("<img") == 3  # accuracy, differences and loss
    assert not re.search("<(script|link|iframe)", page.html)
    columns = re.findall('data-column="(.*?)"', page.html)
    assert columns[:5] == ["position", "seeds", "8x8", "8x12", "16x16"]
    mean, half = student([0.95, 0.85])
    for low, high in (np.clip([mean - half, mean + half], 0, 1), wilson(0.9, 360)):
        interval = f"[{100 * low:.1f}, {100 * high:.1f}]"  # of two seeds, of one run
        assert f"90.0 {interval}" in [row[2] for row in page.rows if len(row) > 2]
        assert f"90.0\n{interval}\n" in page.text


def segmentation_rows(miou, iou):
    row = {"miou": miou, "accuracy": 0.9, "iou": iou, "resolution": [64, 64], "count": 200}
    metadata = {"dataset": "scenes", "split": "test", "protocol": "as it is"}
    return [row | metadata | {"class_names": ["sky", "sea"]}]


def detection_rows(ap, by_class):
    scores = dict.fromkeys(("ap", "ap50", "ap75", "ap_small"), ap)
    scores |= {"ap_medium": None, "ap_large": None, "class_ap": by_class}
    metadata = {"dataset": "scenes", "split": "test", "count": 200, "protocol": "as it is"}
    return [scores | metadata | {"resolution": [64, 64], "class_names": ["zero", "one"]}]


@pytest.mark.parametrize(
    ("make_rows", "name", "further"),
    [
        (segmentation_rows, "mean IoU", ["12.5", "90.0"]),
        (detection_rows, "average precision", [*["12.5"] * 4, "-", "-"]),
    ],
)
def test_dense_runs_are_compared_by_their_score(tmp_path, capsys, make_rows, name, further):
    """A mean over classes is not a fraction of images: for a single run it has no interval."""
    a = workdir(tmp_path / "a", "ape", make_rows(0.25, [0.25, None]))
    b = workdir(tmp_path / "b", "rope2d", make_rows(0.5, [0.5, 0.5]))
    add_evaluation(a / "evaluations.json", make_rows(0.125, [0.125, None])[0] | {"asked": {}})
    report.main([str(a), str(b)])
    assert f"{name} (%) at test resolution" in capsys.readouterr().out
    assert (tmp_path / "comparison.txt").read_text().splitlines()[-1].split() == ["rope2d", "+25.0"]
    page = Page(tmp_path)
    assert f"{name[1:]} in percent (scenes test, 200 images)" in page.text
    assert "a single run has none" in page.text
    first, second = make_rows(0, [])[0]["class_names"]
    assert [first, "25.0", "50.0"] in page.rows
    assert [second, "-", "50.0"] in page.rows
    assert ["a", "scenes", "64x64", *further, "as it is"] in page.rows
    c = workdir(tmp_path / "c", "rope2d", rows(((8, 8), 0.95)), seed=1)
    with expect_refusal(capsys, f"by {name} and .* by top-1 accuracy: compare runs of"):
        report.main([str(a), str(c)])


@pytest.mark.parametrize(
    ("other", "blocks"),
    [
        (segmentation_rows(0.7, [0.8, 0.6]), 2),
        ([segmentation_rows(0.5, [0.5])[0] | {"class_names": ["sky"]}], 0),
        (rows(((8, 8), 0.9)), 0),
        (detection_rows(0.5, [0.5, None]), 0),
    ],
)
def test_classes_are_compared_if_all_runs_share_them(tmp_path, other, blocks):
    """Other kinds of runs, and sets with other classes, have no such table."""
    rows_by_run = {"a": segmentation_rows(0.5, [0.6, 0.4]), "b": other}
    runs = {
        name: report.read_runs(workdir(tmp_path / name, "ape", x))
        for name, x in rows_by_run.items()
    }
    assert len(comparison_page._classes(runs)) == blocks


def test_crops_of_a_run_are_not_counted_as_seeds(tmp_path):
    """The first crop is compared, the second is listed; the scheme is the model's default."""
    first = rows(((8, 8), 0.9), ((12, 12), 0.8))
    second = [row | {"protocol": "smaller <crop>"} for row in rows(((8, 8), 0.7), ((12, 12), 0.6))]
    report.main([str(workdir(tmp_path / "a", None, first + second))])
    table = (tmp_path / "comparison.txt").read_text()
    assert table.splitlines()[-1].split() == ["axial_rope", "90.0", "80.0"]
    compared, listed = ([score([row]).text() for row in crop_rows] for crop_rows in (first, second))
    page = Page(tmp_path)
    assert ["axial_rope", "1", *compared] in page.rows
    others = [row[2:4] for row in page.rows if row[-1] == "smaller <crop>"]
    assert others == [["8x8", listed[0]], ["12x12", listed[1]]]
    assert "reproduce" not in page.text


def test_workdirs_with_equal_names_are_kept_separate(tmp_path):
    """Naming a run twice does not add a seed."""
    results = rows(((8, 8), 0.9))
    a, b = (workdir(tmp_path / x / "run", "ape", results, seed=k) for k, x in enumerate("xy"))
    for number, path in enumerate((a, b)):
        (path / "decay.png").write_bytes(b"\x89PNG" + bytes([number]))
    report.main([str(a), str(b), str(a), "--out", str(tmp_path / "out")])
    page = Page(tmp_path / "out")
    assert len(set(re.findall('base64,(.*?)" alt=".*: how scores fall', page.html))) == 2
    assert next(row[1] for row in page.rows if row[0] == "ape") == "2"


def test_duplicate_damaged_and_unfinished_runs_are_refused(tmp_path, capsys):
    a, b, damaged = (workdir(tmp_path / name, "ape", rows(((8, 8), 0.9))) for name in "abc")
    (damaged / "config.json").write_text('{"sead": 1}')
    for workdirs, message in (
        ([a, b], f"^rope_jax.analysis.report: {a} and {b} hold the same run, of seed 0"),
        ([damaged], rf"report: {damaged}/config\.json holds .* \(sead is not a setting"),
        ([tmp_path / "nothing"], "nothing does not exist; complete its run first"),
    ):
        with expect_refusal(capsys, message):
            report.main(list(map(str, workdirs)))


def test_the_page_of_a_papers_data_set_names_the_command_for_published_numbers(tmp_path):
    results = rows(((224, 224), 0.8), ((384, 384), 0.81), dataset="imagenet")
    a = workdir(tmp_path / "a", "rope_mixed", results, model="deit3_s16")
    (variant,) = rows(((224, 224), 0.5), dataset="imagenet_a")
    add_evaluation(a / "evaluations.json", variant | {"asked": {}})
    report.main([str(a)])
    page = Page(tmp_path)
    assert "rope_jax reproduce --runs=WORKDIR lists" in page.text
    assert ["a", "imagenet_a", "224x224"] in [row[:3] for row in page.rows]


def test_pictures_of_a_run_depend_on_its_scheme(tmp_path, capsys):
    a = workdir(tmp_path / "a", "rope_mixed", rows(((8, 8), 0.9)))
    save_run(a, 1, position="rope_mixed")
    report.main([str(a), "--analyse"])
    assert {"attention_distance.png", "decay.png", "learned.png"} <= {x.name for x in a.iterdir()}
    assert "correlation: RopeMixed adds no embedding" in capsys.readouterr().err
    assert "vit_digits with rope_mixed: how scores fall with distance" in Page(tmp_path).text


def test_without_matplotlib_the_page_has_no_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(curves.importlib.util, "find_spec", lambda name: None)
    report.main([str(workdir(tmp_path / "a", "ape", rows(((8, 8), 0.9)), losses=(1.0,)))])
    assert "<img" not in (tmp_path / "report.html").read_text()
    assert "pip install 'rope_jax[plot]'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({"seed": 1, "log_every": 5, "plugins": ["math"]}, ["ape"]),  # irrelevant to results
        ({"seed": 1, "data": {"path": "b"}}, ["ape", "ape (b)"]),
        ({"options": "width=16,depth=2"}, ["ape, depth=1", "ape, depth=2"]),
        ({"options": "width=16"}, ["ape, depth=1", "ape"]),
    ],
)
def test_runs_are_labelled_by_what_affects_their_results(tmp_path, monkeypatch, changes, labels):
    monkeypatch.setattr(plugins, "_loaded", {})
    a, b = (workdir(tmp_path / name, "ape", rows(((8, 8), 0.9))) for name in "ab")
    if "options" in changes:
        write_config(a, "ape", options="width=16,depth=1")
    write_config(b, "ape", **changes)
    groups = report.group_runs([*report.read_runs(a), *report.read_runs(b)])
    assert list(groups) == labels


def test_other_differences_than_position_and_label_are_named(tmp_path):
    a = workdir(tmp_path / "a", "ape", rows(((8, 8), 0.9)))
    b = workdir(tmp_path / "b", "rope2d", rows(((8, 8), 0.8)), seed=3)
    write_config(b, "rope2d", options="depth=2", seed=3)
    groups = report.group_runs([*report.read_runs(a), *report.read_runs(b)])
    assert comparison_page.unlike(groups) == []
    write_config(b, "rope2d", epochs=2.0)
    write_results(b, 1674, rows(((8, 8), 0.8)))
    report.main([str(a), str(b)])
    note = "ape -> rope2d: epochs: 1.0 -> 2.0; steps: 1 -> 1,674."
    assert f"other differences: {note}" in (tmp_path / "comparison.txt").read_text()
    assert f"Other differences: {note}" in Page(tmp_path).text
