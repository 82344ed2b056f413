"""Texts of recipes: commands and tables; and the parameters that they decay."""

import ast
import pathlib
import re

import pytest
from flax import nnx

import rope_jax
from rope_jax.config import load_recipe
from rope_jax.papers.declared import find_artifacts
from rope_jax.papers.lab import Lab
from rope_jax.training.optim import decay_mask
from rope_jax.training.trees import named_leaves
from tests.config.test_recipes import DENSE, FOLDER, RECIPES, resolve_recipe


def docstring(name):
    return ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))


@pytest.mark.parametrize("name", [*RECIPES, *DENSE])
def test_recipes_accept_scheme_and_resolution_and_show_commands(name):
    raw = load_recipe(f"{name}:position=rope2d,resolution=64")
    assert (raw.model.position, raw.data.image_size) == ("rope2d", 64)
    assert f"--config={name}:" in docstring(name)


@pytest.mark.parametrize("name", [*RECIPES, *DENSE])
def test_recipes_name_the_tables_that_train_them(name):
    text = " ".join(docstring(name).split())
    ids = re.findall(r"`(?:rope_jax reproduce )?([a-z]+/(?:table|figure)_[\w.]+)`", text)
    assert f"rope_jax reproduce {ids[0]}" in text
    lab = Lab("full", pathlib.Path("runs"))
    for artifact in find_artifacts(ids):
        runs = [stage for run in artifact.runs(lab) for stage in run.stages]
        assert name in {run.recipe.partition(":")[0] for run in runs}, artifact.id


# Parameters decayed besides kernels by the official optimizers, and a small form of the model.
ONE, TWO = {"depth": 1}, {"depths": (1, 1), "heads": (2, 4)}
DECAYED = [
    ("thesis", "variant=nat_mini,position=rpb", TWO, {"offsets"}),
    ("thesis", "variant=dinat_mini,position=rpb", TWO, {"offsets"}),
    ("thesis", "variant=vit_s16,position=rpb", ONE, {"offsets"}),
    ("thesis", "variant=swin_t,position=rpb+rope_mixed", TWO, {"offsets"}),
    ("swin", "position=rpb", TWO, set()),
    ("swin", "position=rope_mixed", TWO, set()),
    ("swin", "variant=swinv2_t", TWO, set()),
    ("deit3", "position=rope_mixed+ape", ONE, set()),
    ("lape", "variant=deit_ti16", ONE, set()),
    ("cct", "variant=vit_lite_7_4", ONE, {"class_token", "embedding"}),
    ("cct", "variant=cct_7_3x1,position=lape(ape)", ONE, {"embedding"}),
    ("cat", "variant=cat_vit_5", ONE, {"class_token", "scale", "bias"}),
    ("upernet", "position=rope_mixed+ape", ONE, {"class_token", "embedding", "mixed"}),
]


@pytest.mark.parametrize(("name", "arguments", "small", "decayed"), DECAYED)
def test_decayed_parameters_match_the_official_optimizers(name, arguments, small, decayed):
    config = resolve_recipe(f"{name}:{arguments}")
    options = {"position": config.model.position, **small}
    params = nnx.eval_shape(
        lambda: nnx.state(rope_jax.create_model(config.model.name, **options), nnx.Param)
    )
    mask = dict(named_leaves(decay_mask(params, config.optim.exempt)))
    names = {x: {path.split(".")[-1] for path in mask if mask[path] == x} for x in (True, False)}
    assert names[True] == {"kernel"} | decayed
    assert "kernel" not in names[False]
    assert not names[False] if name == "cat" else "bias" in names[False]
