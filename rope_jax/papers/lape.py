"""Yu et al., LaPE (2212.05262). The supplement prints settings; accuracies are the main text's."""

import re
from collections.abc import Mapping
from typing import Any

from rope_jax.analysis.joining import LAMBDAS, PARTS, TERMS
from rope_jax.papers.claims import above
from rope_jax.papers.figures import Layers, Maps, correlation_maps, reach
from rope_jax.papers.runs import Run
from rope_jax.papers.tables import Settings, recipe_config, setting_text

_CCT = ("vit_lite_7_4", "cvt_7_4", "cct_7_3x1")
_VARIANTS = {"DeiT": "deit_ti16", "T2T-ViT": "t2t_vit_7", "Swin": "swin_t", "CeiT": "ceit_t"}
_FIELDS = {
    "learning_rate": lambda c: c.optim.learning_rate,
    "schedule": lambda c: c.optim.schedule,
    "min_lr": lambda c: c.optim.min_learning_rate,
    "weight_decay": lambda c: c.optim.weight_decay,
    "batch_size": lambda c: c.batch_size,
    "epochs": lambda c: c.epochs - c.optim.cooldown_epochs,
    "cooldown": lambda c: c.optim.cooldown_epochs,
    "warmup": lambda c: c.optim.warmup_epochs,
    "crop": lambda c: c.data.image_size,
    "optimizer": lambda c: c.optim.name,
    "iterations": lambda c: c.steps,
}


def _run(key: Mapping[str, Any]) -> Run:
    model, position, dataset = key["model"], key["position"], key["dataset"]
    recipe = f"cct:dataset={dataset},variant={model}" if model in _CCT else f"lape:variant={model}"
    return Run(model, position, recipe)


def _dense_run(key: Mapping[str, Any]) -> Run:
    size, position = key["model"].rpartition("_")[2], key["position"]
    backbone = Run(f"deit_{size}", position, f"lape:variant=deit_{size}")
    adapter = key["model"].startswith("vit_adapter")
    variant = f"adapter_{size.removesuffix('16')}"
    recipe = f"upernet:variant={variant}" if adapter else f"segmenter:variant=deit_{size}"
    if key["dataset"] == "coco":
        recipe = f"mask_rcnn:variant={variant}"
    return Run(key["model"], position, recipe, after=backbone)


def _setting(recipe: str, key: Mapping[str, Any]) -> str | None:
    field = _FIELDS.get(key["setting"])
    return None if field is None else setting_text(field(recipe_config(recipe)))


def _classification(key: Mapping[str, Any]) -> str | None:
    if key["family"] in _VARIANTS:
        recipe = f"lape:variant={_VARIANTS[key['family']]}"
    else:
        recipe = f"cct:dataset={key['dataset']},variant=cct_7_3x1"
    return _setting(recipe, key)


def _dense(key: Mapping[str, Any]) -> str | None:
    size = key["backbone"].rpartition("-")[2].lower()
    adapter = key["name"] == "ViT-Adapter"
    recipe = f"upernet:variant=adapter_{size}" if adapter else f"segmenter:variant=deit_{size}16"
    return _setting(recipe, key)


def _instances(key: Mapping[str, Any]) -> str | None:
    size = key["backbone"].rpartition("-")[2].lower()
    recipe = f"mask_rcnn:variant=adapter_{size}"
    if key["setting"] == "crop":
        return re.search(r"window=(\d+)", recipe_config(recipe).data.augment)[1]
    return _setting(recipe, key)


def _dense_keys(models: tuple[str, ...], dataset: str, quantity: str) -> list[dict[str, Any]]:
    return [
        {"model": model, "position": position, "dataset": dataset, "quantity": quantity}
        for model in models
        for position in ("ape", "lape(ape)")
    ]


_SEGMENTERS = ("deit_ti16", "deit_s16", "vit_adapter_ti16", "vit_adapter_s16")
_LINES = {
    "figure_I": [
        Run("t2t_vit_7", p, "lape:variant=t2t_vit_7") for p in ("sincos1d", "lape(sincos1d)")
    ],
    "figure_II": [Run("deit_ti16", p, "lape:variant=deit_ti16") for p in ("ape", "lape(ape)")],
}

ARTIFACTS = (
    Settings(
        "table_I",
        "Image classification: settings, and accuracy with the default joining and with LaPE",
        ours=_classification,
        run=_run,
        source="lape/main_text",
        claims=[
            *above("lape(ape)", "ape"),
            *above("lape(sincos1d)", "sincos1d"),
            *above("lape(sincos2d(order=lape))", "sincos2d(order=lape)"),
        ],
        note="accuracies are those of the main text; CIFAR's are means of five seeds",
    ),
    Settings(
        "table_II",
        "Detection: settings, and AP of boxes and masks",
        ours=_instances,
        run=_dense_run,
        more=[
            key
            for quantity in ("box_ap", "mask_ap")
            for key in _dense_keys(_SEGMENTERS[2:], "coco", quantity)
        ],
        claims=above("lape(ape)", "ape"),
        note="claims are about the AP of boxes",
    ),
    Settings(
        "table_III",
        "Segmentation: settings, and mIoU",
        ours=_dense,
        run=_dense_run,
        more=_dense_keys(_SEGMENTERS, "ade20k", "miou"),
        claims=above("lape(ape)", "ape"),
    ),
    *(
        Maps(
            name,
            f"Correlation of positions in every layer of {lines[0].model}",
            lines=lines,
            maps=correlation_maps,
            label="cosine similarity",
            layers=reach,
            note="reach is this library's measure: 1 if similarity does not depend on distance, "
            "small if positions are local",
        )
        for name, lines in _LINES.items()
    ),
    Layers(
        "equation_2",
        "Fractions of tokens, position and bias in a layer's norm: lambda 1, 2 and 3",
        lines=[run for lines in _LINES.values() for run in lines],
        names=(*LAMBDAS, *PARTS),
        note="with LaPE, whose positions have a norm of their own, there are no lambdas: both "
        "parts have sizes, the root mean square",
    ),
    Layers(
        "equation_3",
        "Sizes of the four terms of queries and keys",
        lines=[run for lines in _LINES.values() for run in lines],
        names=TERMS,
        note="root mean square over keys, of which the mean is subtracted; mean of the heads",
    ),
)
