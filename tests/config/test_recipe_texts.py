"""What recipes tell: expected accuracies, deviations; and which parameters they decay."""

import re

import pytest
from flax import nnx

import rope_jax
from rope_jax.analysis import expected
from rope_jax.training.optim import decay_mask
from rope_jax.workdir.trees import named_leaves
from tests.config.test_recipes import DENSE, RECIPES, recipe, resolved


@pytest.mark.parametrize("name", [*RECIPES, *DENSE])
def test_a_recipe_tells_what_it_costs(name):
    raw, text = recipe(name, "position=rope2d,resolution=64")
    assert raw.model.position == "rope2d"
    assert raw.data.image_size == 64
    assert f"--config={name}:" in text
    assert re.search(r"Hours: estimated, not\s+measured", text)
    assert "Hardware:" in text
    assert re.search(r"\n\nDeviations from the original, as far as known:\n\n- ", text)


def paragraphs(text, *, after, before):
    """The tables between two parts of a docstring, as lists of rows of cells."""
    part = text[text.index(after) : text.index(before, text.index(after))]
    return [
        [re.split(r"  +", line.strip()) for line in paragraph.strip("\n").splitlines()]
        for paragraph in part.split("\n\n")
        if re.match(r"\n? {4}\S", paragraph)
    ]


def tables(text):
    """The source of the expected accuracies of a docstring, and its tables as (header, rows)."""
    start = re.search(r"Expected top-1 in percent \((.+?)\), not\s+trained\s+here", text, re.S)
    found = paragraphs(text, after=start[0], before="Deviations from the original")
    return " ".join(start[1].split()), [(header, rows) for header, *rows in found]


@pytest.mark.parametrize("name", RECIPES)
def test_expected_accuracies_are_those_of_the_papers_tables(name):
    """Every number, against `analysis.expected`; of its models, all are there."""
    source, found = tables(recipe(name)[1])
    shown = []
    for (about, *positions), rows in found:
        dataset, sides = about.split(" ", 1)
        for model, *cells in rows:
            for position, cell in zip(positions, cells, strict=True):
                if cell == "-":
                    continue
                sizes = [[int(side)] * 2 for side in sides.split(", ")]
                for size, value in zip(sizes, cell.split(", "), strict=True):
                    entries = expected.find(
                        model=model, position=position, dataset=dataset, resolution=size
                    )
                    entries = [entry for entry in entries if entry["source"] == source]
                    assert [entry["top1"] for entry in entries] == [float(value)], (model, position)
                    shown.append(entries[0])
    models = {entry["model"] for entry in shown}
    published = [
        entry
        for entry in expected.entries()
        if entry["source"] == source and entry.get("model") in models and "top1" in entry
    ]
    assert [entry for entry in published if entry not in shown] == []
    assert len(shown) == len(published) > 1


# What is decayed besides kernels, by the official optimizers' rules.
DECAYED = {
    ("thesis", "variant=nat_mini,position=rpb"): {"offsets"},
    ("thesis", "variant=dinat_mini,position=rpb"): {"offsets"},
    ("thesis", "variant=vit_s16,position=rpb"): {"offsets"},
    ("thesis", "variant=swin_t,position=rpb+rope_mixed"): {"offsets"},
    ("swin", "position=rpb"): set(),
    ("swin", "position=rope_mixed"): set(),
    ("deit3", "position=rope_mixed+ape"): set(),
    ("lape", "variant=deit_ti16"): set(),
    ("cct", "variant=vit_lite_7_4"): {"class_token", "embedding"},
    ("cct", "variant=cct_7_3x1,position=lape(ape)"): {"embedding"},
    ("cat", "variant=cat_vit_5"): {"class_token", "scale", "bias"},
}


@pytest.mark.parametrize(("name", "arguments"), DECAYED)
def test_decayed_parameters_are_those_of_the_official_optimizers(name, arguments):
    config = resolved(name, arguments)
    small = {"depth": 1} if name in ("cct", "deit3", "lape", "cat") else {"depths": (1, 1)}
    if small == {"depths": (1, 1)}:
        small["heads"] = (2, 4)
    if "vit_s16" in arguments:
        small = {"depth": 1}
    create = lambda: rope_jax.create_model(
        config.model.name, position=config.model.position, **small
    )
    params = nnx.state(nnx.eval_shape(create), nnx.Param)
    mask = dict(named_leaves(decay_mask(params, config.optim.exempt)))
    decayed = {path.split(".")[-1] for path, decays in mask.items() if decays}
    assert decayed - {"kernel"} == DECAYED[name, arguments]
    kernels = [decays for path, decays in mask.items() if path.endswith("kernel")]
    assert all(kernels)
    exempt = {path for path, decays in mask.items() if not decays}
    assert not exempt if name == "cat" else {path.split(".")[-1] for path in exempt} >= {"bias"}
