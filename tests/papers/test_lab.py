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


def test_gains_are_over_the_first_scheme_whichever_rows_are_made(tmp_path):
    lab = Lab("full", tmp_path)
    all_gains = ARTIFACTS["heo/figure_6"].cells(lab)
    only = dataclasses.replace(lab, only=("rope_mixed", "rope_mixed+ape"))
    bases = {"ape", "rpb"}  # of ViTs and of Swins
    assert {run.position for run in ARTIFACTS["heo/figure_6"].runs(only)} == bases | {*only.only}
    some = ARTIFACTS["heo/figure_6"].cells(only)
    assert some == [cell for cell in all_gains if cell["key"]["position"] in only.only]
    assert {cell["key"]["position"] for cell in some} == {*only.only}
