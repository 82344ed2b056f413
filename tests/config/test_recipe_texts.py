"""Texts of recipes: expected accuracies and deviations; and the parameters that they decay."""

import re

import pytest
from flax import nnx

import rope_jax
from rope_jax.papers import find_published, published
from rope_jax.training.optim import decay_mask
from rope_jax.training.trees import named_leaves
from tests.config.test_recipes import DENSE, RECIPES, recipe, resolve_recipe


@pytest.mark.parametrize("name", [*RECIPES, *DENSE])
def test_recipes_accept_scheme_and_resolution_and_show_commands(name):
    raw, text = recipe(name, "position=rope2d,resolution=64")
    assert (raw.model.position, raw.data.image_size) == ("rope2d", 64)
    assert f"--config={name}:" in text


def cells(text, *, after, before):
    """Yields (quantity, model, position, value) of table cells between two parts of a text."""
    part = text[text.index(after) : text.index(before, text.index(after))]
    for paragraph in part.split("\n\n"):
        if re.match(r"\n? {4}\S", paragraph):
            lines = [re.split(r"  +", line.strip()) for line in paragraph.strip("\n").splitlines()]
            (quantity, *positions), *rows = lines
            for model, *values in rows:
                for position, value in zip(positions, values, strict=True):
                    if value != "-":
                        yield quantity, model, position, value


@pytest.mark.parametrize("name", RECIPES)
def test_expected_accuracies_match_the_papers(name):
    """Compares all numbers with `papers.published`, which has no others of these models."""
    _, text = recipe(name)
    start = re.search(r"Expected top-1 in percent \((.+?)\), not\s+trained\s+here", text, re.S)
    filter_source = lambda cells: [x for x in cells if x.source == " ".join(start[1].split())]
    shown = []
    for column, model, position, values in cells(text, after=start[0], before="Known deviations"):
        dataset, sides = column.split(" ", 1)
        for side, value in zip(sides.split(", "), values.split(", "), strict=True):
            key = {"dataset": dataset, "resolution": [int(side)] * 2, "quantity": "top1"}
            found = filter_source(find_published(model=model, position=position, **key))
            assert [cell.value for cell in found] == [float(value)], (model, position)
            shown += found
    models = {cell.key["model"] for cell in shown}
    others = [x for x in filter_source(published()) if x.key.get("model") in models]
    assert [x for x in others if x not in shown and x.key["quantity"] == "top1"] == []
    assert len(shown) > 1


@pytest.mark.parametrize(
    ("name", "kind", "after", "before", "count"),
    [
        ("upernet", "mIoU, UperNet, {}", "Expected mIoU", "LaPE's", 20),
        ("mask2former", "{}, Mask2Former", "Expected mIoU", "Mask2Former's own", 10),
        ("dino", "box AP, {}, 12 epochs", "Expected box AP", "With `rpb`", 25),
    ],
)
def test_expected_values_match_the_papers(name, kind, after, before, count):
    """Compares all numbers of a docstring with `papers.published`, which has no others."""
    shown = {
        (kind.format(column), model, position): float(value)
        for column, model, position, value in cells(recipe(name)[1], after=after, before=before)
    }
    printed = {
        (cell.key["task"], cell.key["model"], cell.key["position"]): cell.value
        for cell in published()
        if re.fullmatch(kind.format(".*"), cell.key.get("task", ""))
    }
    assert shown == printed
    assert len(shown) == count


# Parameters decayed besides kernels by the official optimizers, and a small form of the model.
ONE, TWO = {"depth": 1}, {"depths": (1, 1), "heads": (2, 4)}
DECAYED = [
    ("thesis", "variant=nat_mini,position=rpb", TWO, {"offsets"}),
    ("thesis", "variant=dinat_mini,position=rpb", TWO, {"offsets"}),
    ("thesis", "variant=vit_s16,position=rpb", ONE, {"offsets"}),
    ("thesis", "variant=swin_t,position=rpb+rope_mixed", TWO, {"offsets"}),
    ("swin", "position=rpb", TWO, set()),
    ("swin", "position=rope_mixed", TWO, set()),
    ("deit3", "position=rope_mixed+ape", ONE, set()),
    ("lape", "variant=deit_ti16", ONE, set()),
    ("cct", "variant=vit_lite_7_4", ONE, {"class_token", "embedding"}),
    ("cct", "variant=cct_7_3x1,position=lape(ape)", ONE, {"embedding"}),
    ("cat", "variant=cat_vit_5", ONE, {"class_token", "scale", "bias"}),
    ("upernet", "position=rope_mixed+ape", ONE, {"class_token", "embedding", "mixed"}),
]


@pytest.mark.parametrize(("name", "arguments", "small", "decayed"), DECAYED)
def test_decayed_parameters_match_the_official_optimizers(name, arguments, small, decayed):
    config = resolve_recipe(name, arguments)
    options = {"position": config.model.position, **small}
    params = nnx.eval_shape(
        lambda: nnx.state(rope_jax.create_model(config.model.name, **options), nnx.Param)
    )
    mask = dict(named_leaves(decay_mask(params, config.optim.exempt)))
    names = {x: {path.split(".")[-1] for path in mask if mask[path] == x} for x in (True, False)}
    assert names[True] == {"kernel"} | decayed
    assert "kernel" not in names[False]
    assert not names[False] if name == "cat" else "bias" in names[False]
