"""The declarations of the four papers: ids, published numbers, runs and their commands."""

import collections
import json

import pytest

from rope_jax.commands import evaluate, train
from rope_jax.papers import published
from rope_jax.papers.declared import ARTIFACTS, DECLARED, find_artifacts, sides_by_model
from rope_jax.papers.figures import Curves, Gains
from rope_jax.papers.lab import Lab
from rope_jax.papers.published import same_position
from rope_jax.papers.runs import Run
from rope_jax.papers.tables import Settings, Table

IDS = {
    "thesis": "table_3.1 figure_3.1 table_4.1 table_4.2 table_4.3 table_4.4 table_A.1 table_A.2 "
    "table_B.1 table_B.2 table_B.3 figure_C.1 table_D.1 table_E.1 table_E.2 table_F.1 table_F.2",
    "heo": "figure_1 figure_2 figure_3 figure_4 figure_5 figure_6 table_1 table_2 table_3 table_4 "
    "table_5",
    "lape": "table_I table_II table_III figure_I figure_II equation_2 equation_3",
    "cat": "figure_decay table_1 table_2 table_3 table_4",
}


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return Lab("full", tmp_path_factory.mktemp("papers"), sizes=sides_by_model())


def test_every_table_and_figure_is_declared_in_the_order_of_the_text():
    declared = {paper.name: [a.name for a in paper.artifacts] for paper in DECLARED}
    assert declared == {name: ids.split() for name, ids in IDS.items()}


def reached(artifact, lab):
    """The published cells of an artifact, as texts of their keys."""
    if isinstance(artifact, Table):
        own = published(artifact.id) if isinstance(artifact, Settings) else ()
        numbers = [text for text, (_, value) in artifact.keys(lab).items() if value is not None]
        return [*numbers, *(json.dumps(dict(cell.key), sort_keys=True) for cell in own)]
    if isinstance(artifact, Curves) and not isinstance(artifact, Gains):  # gains repeat curves
        shown = [(c["key"], c["published"]) for c in artifact.cells(lab)]
        return [json.dumps(key, sort_keys=True) for key, value in shown if value is not None]
    return []


def test_every_published_number_is_reached_by_one_declaration(full):
    texts = [text for a in ARTIFACTS.values() for text in reached(a, full)]
    expected = [json.dumps(dict(cell.key), sort_keys=True) for cell in published()]
    assert collections.Counter(texts) == collections.Counter(expected)


def recipe_of(job):
    return job.words[1].removeprefix("--config=").partition(":")[0]


def test_commands_of_full_runs_are_those_of_the_recipes(full):
    """One command of each recipe in `make test`; all of them are resolved in slow tests."""
    jobs = full.jobs(run for a in ARTIFACTS.values() for run in a.runs(full))
    by_recipe = {recipe_of(job): job for job in jobs if job.words[0] == "train"}
    assert set(by_recipe) == {
        "thesis", "deit3", "swin", "lape", "cct", "cat", "dino", "upernet", "mask2former",
        "mask_rcnn", "segmenter", "resformer",
    }  # fmt: skip
    for job in by_recipe.values():
        args, config = train.parse(list(job.words[1:]))
        assert args.workdir == job.result.parent
        text = job.words[1].partition("position=")[2].partition(",")[0]
        assert same_position(config.model.position, text)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ARTIFACTS))
def test_all_commands_of_full_runs_resolve(full, name):
    for job in full.jobs(ARTIFACTS[name].runs(full)):
        if job.words[0] == "train":
            train.parse(list(job.words[1:]))
        else:
            evaluate._parser().parse_args(list(job.words[1:]))


def test_large_vits_are_trained_in_two_stages_and_dense_models_start_from_them(tmp_path):
    """All stages have the same seed."""
    lab = Lab("full", tmp_path, seeds=2)
    *_, first, finetune, dense = lab.jobs(ARTIFACTS["heo/table_1"].runs(lab)[2:3])
    names = [f"{name}-rope_mixed-1" for name in ("deit3-b", "deit3-b-finetune", "dino-vit_b")]
    assert [job.result.parent.name for job in (first, finetune, dense)] == names
    assert "seed=1" in finetune.words[1]
    assert f"init_from={lab.folder}/{names[0]}" in finetune.words[1]
    assert f"--config.init_from={lab.folder}/{names[1]}" in dense.words


def test_runs_are_shared_by_figures_and_sizes_of_a_family(tmp_path):
    lab = Lab("smoke", tmp_path, sizes=sides_by_model())
    runs = lambda *names: {
        job.result for name in names for job in lab.jobs(ARTIFACTS[name].runs(lab))
    }
    assert len(runs("heo/figure_4")) == 5
    assert runs("heo/figure_2", "heo/figure_3") < runs("heo/figure_4")
    assert len(runs("thesis/table_4.1")) == 4 * 3


def test_runs_on_other_images_have_other_folders(tmp_path):
    folders = {
        Lab("small", tmp_path, data=data, epochs=epochs).folder
        for data in ({}, {"images": "a/x.npz"}, {"images": "b/x.npz"})
        for epochs in (None, 5.0)
    }
    assert len(folders) == 6


def test_sizes_of_one_run_are_judged_and_drawn_once(tmp_path):
    """S, B and L have one stand-in; 160 and 224 pixels of Swin are one size of it."""
    lab = Lab("smoke", tmp_path)
    verdicts = ARTIFACTS["heo/figure_4"].verdicts(lab)
    assert [v["claim"].split(", ")[1] for v in verdicts] == ["stand-in of deit3"] * 3
    run = ARTIFACTS["heo/figure_5"].lines[0]
    assert lab.distinct_sides(run, (160, 192)) == []
    assert lab.distinct_sides(run, (320, 384)) == [384]


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([0.2, 0.3, 0.5, 0.6], ["shown", "shown"]),
        ([0.5, 0.9, 0.8, 0.4, 0.3, 0.6], ["refuted", "shown"]),  # the last layer alone
        ([None, None], ["not tested", "not tested"]),
    ],
)
def test_local_to_global_needs_a_trend_and_a_last_layer(tmp_path, monkeypatch, layers, words):
    by_seed = {seed: ("run", {"reach": layers}) for seed in (0, 1)}
    monkeypatch.setattr(Lab, "analyse", lambda *_: by_seed)
    verdicts = ARTIFACTS["lape/figure_II"].verdicts(Lab("smoke", tmp_path))
    assert [verdict["verdict"] for verdict in verdicts] == words
    assert all(verdict["claim"].startswith("reach") for verdict in verdicts)


def test_options_of_a_run_change_its_stand_in_unless_they_set_its_size(tmp_path):
    lab = Lab("small", tmp_path)
    runs = {run.options: run for run in ARTIFACTS["cat/table_4"].runs(lab)}
    (job, *_) = lab.jobs([runs["imprint=none"]])
    assert "imprint=none" in next(w for w in job.words if w.startswith("--config.model.options="))
    wide = Run("dinov2_s14", "ape", "cat:variant=dinov2_s14", "width=1024,depth=5")
    (job, *_) = lab.jobs([wide])
    assert "1024" not in " ".join(job.words)


def test_own_schemes_join_every_table_and_figure(tmp_path):
    lab = Lab("smoke", tmp_path, schemes=("lape(ape)",))
    lines = [run.position for run in ARTIFACTS["heo/figure_4"].runs(lab)]
    assert lines.count("lape(ape)") == 3  # S, B and L
    rows = [key["position"] for key, _ in ARTIFACTS["thesis/table_4.1"].keys(lab).values()]
    assert rows.count("lape(ape)") == 13


def test_the_name_of_a_paper_stands_for_all_of_its_tables_and_figures():
    assert {a.paper for a in find_artifacts(["heo"])} == {"heo"}
    assert find_artifacts(["all"]) == list(ARTIFACTS.values())
