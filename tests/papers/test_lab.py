"""The runs of `rope_jax reproduce`: which rows and models are those of a run."""

import dataclasses

import pytest
from flax import nnx

from rope_jax import config as cfg
from rope_jax.analysis.runs import RunResults
from rope_jax.config import ConfigError
from rope_jax.evaluate.results import write_results
from rope_jax.papers import lab as lab_module
from rope_jax.papers.declared import ARTIFACTS
from rope_jax.papers.figures import line_labels
from rope_jax.papers.kinds import explain
from rope_jax.papers.lab import Lab
from rope_jax.papers.runs import Run
from rope_jax.runs.loading import LoadedModel
from rope_jax.weights import Preprocessing

RUN = Run("deit3_s16", "ape", "")


def given(folder, seed=0, position="ape", others=(), **settings):
    """A run of the user, of step 5, with a row of 224 pixels."""
    model = {"name": RUN.model, "position": position}
    config = cfg.resolve({"model": model, "seed": seed, **settings})
    row = {"resolution": [224, 224], "top1": 0.5, "count": 10, "protocol": "", "dataset": "images"}
    further = [
        row | {"top1": top1, "resolution": [384, 384], "asked": {"dataset": "folder"} | asked}
        for top1, asked in others
    ]
    return RunResults(folder, config, 5, [row], further, ())


def test_evaluations_by_other_rules_are_not_those_of_a_run(tmp_path):
    own = {"step": 5, "windows": "kept", "rpb_shrink": None}
    others = (
        (0.1, own | {"extend": "ntk", "log_scale": False}),
        (0.2, own | {"limit": 10}),
        (0.3, own | {"step": 4}),
        (0.4, own | {"windows": "scaled"}),
        (0.5, own | {"images": "elsewhere"}),
        (0.5, own | {"dataset": "imagenet", "images": "val", "crop": 0.5}),
        (0.6, own),
    )
    score = lambda run: Lab("small", tmp_path, given=(run,)).scores(RUN, 384)[0][1]["top1"]
    assert score(given(tmp_path, others=others)) == 0.6
    assert score(given(tmp_path, others=others, eval={"extend": "ntk"})) == 0.1


def test_two_runs_of_a_seed_are_refused(tmp_path):
    runs = (given(tmp_path / "a"), given(tmp_path / "b", epochs=7))
    with pytest.raises(
        ConfigError, match=r"a and .*b are two runs of deit3_s16 with ape and seed 0"
    ):
        Lab("small", tmp_path, given=runs).rows(RUN)


def test_runs_of_other_settings_are_no_seeds_of_a_run(tmp_path):
    runs = (given(tmp_path / "a"), given(tmp_path / "b", seed=1, epochs=7))
    with pytest.raises(ConfigError, match=r"a and .*b are runs .* seed \(epochs: .* -> 7.0\)"):
        Lab("small", tmp_path, given=runs).rows(RUN)
    own = [{"init_from": f"first-{seed}", "eval": {"batch_size": seed + 1}} for seed in (0, 1)]
    runs = tuple(given(tmp_path, seed, **settings) for seed, settings in enumerate(own))
    assert Lab("small", tmp_path, given=runs).rows(RUN).keys() == {0, 1}


def test_single_runs_have_the_seed_of_their_recipe(tmp_path, monkeypatch):
    result = given(tmp_path, seed=121)
    result = dataclasses.replace(result, others=[{"top1": 0.4}])  # of another program
    monkeypatch.setattr(lab_module, "read_runs", lambda folder: [result])
    lab = Lab("full", tmp_path)
    folder = lab.run_folder(RUN, None)
    folder.mkdir(parents=True)
    write_results(folder, 5, result.rows)
    assert lab.rows(RUN) == {121: (folder, result.rows)}


def test_empty_cells_of_own_runs_name_the_command_that_fills_them(tmp_path):
    lab = Lab("small", tmp_path, given=(given(tmp_path),))
    note = explain(lab, RUN, None, "imagenet_real", None)
    assert note == "rope_jax evaluate WORKDIR --dataset=real --images=FOLDER adds it"


def test_intervals_of_accuracies_end_at_100_percent(tmp_path):
    row = {"top1": 0.97, "count": 10}
    measured = Lab("small", tmp_path).measured({0: ("a", row), 1: ("b", row | {"top1": 0.99})})
    assert (round(measured["mean"], 6), measured["interval"][1]) == (98.0, 100.0)


def test_cells_of_a_data_set_are_not_those_of_one_with_a_longer_name(tmp_path):
    table = ARTIFACTS["lape/table_I"]
    printed = [cell.key for cell in table.printed if cell.key["dataset"] == "cifar10"]
    run = table.run(printed[0])
    own = given(
        tmp_path, position=run.position, model={"name": run.model, "position": run.position}
    )
    own = dataclasses.replace(own, rows=[own.rows[0] | {"dataset": "cifar10"}])
    keys = table.keys(Lab("small", tmp_path, given=(own,))).values()
    assert {key["dataset"] for key, _ in keys} == {"cifar10"}


def test_models_are_measured_by_seed_and_again_after_training(tmp_path, monkeypatch):
    monkeypatch.setattr(
        lab_module,
        "load_run",
        lambda folder, *, seed: LoadedModel(
            nnx.Module(), nnx.Module, "", "", (8, 8), Preprocessing(), None, weights=str(seed)
        ),
    )
    lab = Lab("small", tmp_path, given=tuple(given(tmp_path, seed) for seed in (3, 4)))
    for step, factor in ((5, 1), (5, 2), (9, 2)):  # the second measurement is a stored one
        write_results(tmp_path, step, [])
        values = lab.analyse(
            RUN, "seed", lambda loaded, factor=factor: factor * int(loaded.weights)
        )
        factor = factor if step == 9 else 1
        assert {seed: value for seed, (_, value) in values.items()} == {
            3: 3 * factor,
            4: 4 * factor,
        }


def test_gains_are_over_the_first_scheme_where_it_was_tested(tmp_path):
    runs = [given(tmp_path / x, position=x) for x in ("ape", "rope2d")]
    wider = {"model": {"name": RUN.model, "position": "ape", "options": "width=96"}}
    runs.append(given(tmp_path / "wider", **wider))
    larger = [runs[0].rows[0] | {"resolution": [384, 384]}]
    runs = (runs[0], *(dataclasses.replace(x, rows=[*x.rows, *larger]) for x in runs[1:]))
    cells = ARTIFACTS["heo/figure_6"].cells(Lab("small", tmp_path, given=runs))
    assert [(cell["key"]["position"], cell["key"]["resolution"][0]) for cell in cells] == [
        ("rope2d", 224),
        ("ape", 224),  # of the wider model
    ]


def test_figures_of_accuracy_leave_out_runs_of_other_tasks(tmp_path):
    run = given(tmp_path)
    row = {name: x for name, x in run.rows[0].items() if name != "top1"} | {"miou": 0.4}
    lab = Lab("small", tmp_path, given=(dataclasses.replace(run, rows=[row]),))
    assert ARTIFACTS["heo/figure_4"].cells(lab) == []


def test_lines_are_named_by_what_differs():
    keys = [{"model": "a", "position": "ape"}, {"model": "a", "position": "rpb", "options": "x=1"}]
    assert [*map(line_labels(keys), keys)] == ["ape", "rpb"]
    keys += [{"model": "a", "position": "rpb", "options": "x=2"}, {"model": "b", "position": "ape"}]
    assert [*map(line_labels(keys), keys)] == ["a, ape", "a, rpb, x=1", "a, rpb, x=2", "b, ape"]


def test_gains_are_over_the_first_scheme_whichever_rows_are_made(tmp_path):
    lab = Lab("full", tmp_path)
    all_gains = ARTIFACTS["heo/figure_6"].cells(lab)
    only = dataclasses.replace(lab, only=("rope_mixed", "rope_mixed+ape"))
    bases = {"ape", "rpb"}  # of ViTs and of Swins
    assert {run.position for run in ARTIFACTS["heo/figure_6"].runs(only)} == bases | {*only.only}
    some = ARTIFACTS["heo/figure_6"].cells(only)
    assert some == [cell for cell in all_gains if cell["key"]["position"] in only.only]
    assert {cell["key"]["position"] for cell in some} == {*only.only}
