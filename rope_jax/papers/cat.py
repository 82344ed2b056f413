"""Erickson, Cross-Axis Transformer (2311.07184). In the order of its text."""

from collections.abc import Mapping
from typing import Any

from rope_jax.models.registry import find_model
from rope_jax.papers.claims import above
from rope_jax.papers.drawings import decay
from rope_jax.papers.figures import Drawing
from rope_jax.papers.published import published
from rope_jax.papers.runs import Run
from rope_jax.papers.tables import Settings, Table, recipe_config, setting_text

_BASELINES = {"cat_vit_5": "vit", "dinov2_s14": "dinov2", "beit_b16": "beit"}


def _run(key: Mapping[str, Any]) -> Run | None:
    model = key["model"]
    options = key.get("options", "")
    if options == "imprint=paper":  # the model's own
        options = ""
    return Run(model, key["position"], f"cat:variant={_BASELINES.get(model, model)}", options)


# Of the text, without numbers: the printed formulas, an imprint in the first layers alone (how many
# is not printed), and RetNet's norm between the two products.
_EARLY = "imprint_layers=(0,1)"
_OF_THE_TEXT = (
    "imprint=linear",
    "imprint=backwards_linear",
    _EARLY,
    "imprint=none,between=retnet",
)

_FIELDS = {
    "epochs": lambda c: c.epochs,
    "optimizer": lambda c: c.optim.name,
    "lr_schedule": lambda c: c.optim.schedule,
    "learning_rate": lambda c: c.optim.learning_rate,
    "dataset": lambda c: "ImageNet1k",
    "patch_size": lambda c: find_model(c.model.name).options.patch_size,
    "attention_heads": lambda c: find_model(c.model.name).options.heads,
    "batch_size": lambda c: c.batch_size,
    "hidden_layers": lambda c: find_model(c.model.name).options.depth,
    "hidden_size": lambda c: find_model(c.model.name).options.width,
}


def _setting(key: Mapping[str, Any]) -> str:
    return setting_text(_FIELDS[key["setting"]](recipe_config("cat:variant=cat_5")))


ARTIFACTS = (
    Drawing("figure_decay", "Decay of the frequencies over the feature dimension", content=decay),
    Table(
        "table_1",
        "Accuracy after ten epochs, and operations",
        run=_run,
        columns="quantity",
        more=[
            dict(cell.key) | {"counted": "all"}
            for cell in published("cat/table_1")
            if cell.key["quantity"].startswith("operations")
        ],
        note="batches of 32 for ViT and BEiT, 64 for DINOv2, as the paper's text says; no BEiT of "
        "these sizes has 24.83e9 operations, probably a slip for 24.88e9",
        claims=above("cat_5", "cat_vit_5", "dinov2_s14", "beit_b16", by="model"),
    ),
    Settings(
        "table_2",
        "Training settings",
        ours=_setting,
    ),
    Settings("table_3", "Models", ours=_setting),
    Table(
        "table_4",
        "Ablations of CAT",
        run=_run,
        columns="quantity",
        more=[
            {"model": "cat_5", "options": options, "position": "cat_rope", "dataset": "imagenet"}
            | {"resolution": [224, 224], "quantity": quantity}
            for options in _OF_THE_TEXT
            for quantity in ("top1", "train_top1")
        ],
        note="whether the learned mask comes with the imprint is not printed: here it does; the "
        "rows called tanh have the decay of the released code, those called linear the formula of "
        "the text; the other rows without a number are claims of sections 2.1 and 2.3",
        claims=[
            *above("", "imprint=none", by="options"),
            *above("imprint=backwards_tanh", "imprint=none", by="options"),
            *above("imprint=none", "focal_mask=True", "imprint=tanh", by="options"),
            *above("imprint=none", _EARLY, "imprint=none,between=retnet", by="options"),
        ],
    ),
)
