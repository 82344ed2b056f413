"""The papers' published numbers: their tables, models and schemes, and the recipes' settings."""

import operator
import pathlib
import runpy

import pytest
from flax import nnx

from rope_jax import config as cfg
from rope_jax.models.registry import list_models
from rope_jax.papers import find_published, published, recipes
from rope_jax.positions import Stage, create_position

# Numbers and texts of each table, counted in the papers.
COUNTS = {
    "thesis": {
        "table_3.1": 4 * 2,
        "table_4.1": 13 * 3,
        "table_4.2": 11 * 8,
        "table_4.3": 11 * 8,
        "table_B.1": 4,
        "table_B.2": 4,
        "table_B.3": 8,
        "table_4.4": 88 + 52,  # images per second, and percent over RPB
        "table_A.1": 4,
        "table_A.2": 9 * 3,
        "table_D.1": 6 * 3 * 3 + 24,
        "table_E.1": 10,
        "table_E.2": 10,
        "table_F.1": 13 * 3 * 2,
        "table_F.2": 13 * 3 * 2,
    },
    "heo": {
        "table_1": 10,
        "table_2": 15,
        "table_3": 20,
        "table_4": 10,
        "table_5": 4 * 9,
        "code": 48,
    },
    "lape": {"table_I": 6 * 8, "table_II": 20, "table_III": 34, "main_text": 37},
    "cat": {"table_1": 4 * 4, "table_2": 5, "table_3": 5, "table_4": 5 * 2},
}


def test_tables_are_complete():
    for paper, counts in COUNTS.items():
        assert {name: len(published(f"{paper}/{name}")) for name in counts} == counts
    cells = published()
    assert len({cell.artifact for cell in cells}) == 29
    keys = [(cell.artifact, str(sorted(cell.key.items(), key=str))) for cell in cells]
    assert len(set(keys)) == len(keys)
    for cell in cells:
        assert ("quantity" in cell.key) != ("setting" in cell.key)
        if cell.key.get("quantity") == "top1":
            assert 10 < cell.value < 100 or cell.key["dataset"] == "imagenet_a"


def test_published_numbers_name_existing_models_and_schemes():
    stage = Stage(
        depth=1, heads=3, head_dim=64, channels=192, grid=(2, 2), prefix=1, embed_prefix=1
    )
    cells = [cell for cell in published() if "model" in cell.key]
    assert {cell.key["model"] for cell in cells} <= set(list_models())
    for position in {cell.key["position"] for cell in cells if "position" in cell.key}:
        nnx.eval_shape(lambda position=position: create_position(position, stage, rngs=nnx.Rngs(0)))


def test_recipes_match_the_tables():
    """Compares printed settings with the recipes that follow the tables."""
    folder = pathlib.Path(__file__).parents[2] / "configs"
    for table in recipes():
        name, _, arguments = table["recipe"].partition(":")
        config = runpy.run_path(str(folder / f"{name}.py"))["get_config"](arguments)
        cfg.resolve(config)
        differences = [
            key
            for key, value in table["settings"].items()
            if operator.attrgetter(key)(config) != value
        ]
        assert differences == table.get("differs", []), table
        assert not differences or table["note"]


@pytest.mark.parametrize(
    ("model", "position", "options", "size", "answer"),
    [
        ("vit_s16", "axial_rope(shared=True,k_rope=8)", "", 224, [81.51, 81.5]),  # 4.2 and B.3
        ("vit_s16", "axial_rope(k_rope=1,shared=True)", "", 128, [62.85]),
        ("vit_s16", "rope2d(k_rope=4)", "", 512, [63.8]),
        ("vit_s16", "rpb(std=0.1)", "", 224, [81.2, 81.22, 81.22]),  # 4.1 to 4.3
        ("nat_base", "none", "", 224, [84.0]),
        ("dinat_s_base", "axial_rope", "", 224, [84.0]),
        ("deit3_s16", "rope_mixed+ape", "", 96, [58.5]),
        ("deit_ti16", "lape(ape)", "", 224, [73.11]),
        ("cat_5", "cat_rope", "", 224, [38.9, 38.9]),
        ("cat_5", "cat_rope", "imprint=paper", 224, [38.9, 38.9]),  # the default
        ("cat_5", "cat_rope", "imprint=none", 224, [38.3]),
        ("cat_5", "cat_rope", "imprint=tanh,drop_path=0.1", 224, [36.2]),  # the same weights
        ("cat_5", "cat_rope", "depth=1", 224, []),
    ],
)
def test_numbers_are_found_by_model_scheme_options_and_size(model, position, options, size, answer):
    key = {"dataset": "imagenet", "resolution": [size, size], "quantity": "top1"}
    cells = find_published(model=model, position=position, options=options, **key)
    assert [cell.value for cell in cells] == answer
