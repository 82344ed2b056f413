"""Kane's thesis (2025): Axial RoPE and its fused kernel. In the order of its text."""

from collections.abc import Mapping
from typing import Any

from rope_jax.analysis.speed import SIZES
from rope_jax.papers.claims import above, as_good
from rope_jax.papers.drawings import angles, channels
from rope_jax.papers.figures import Drawing
from rope_jax.papers.runs import Run
from rope_jax.papers.speed import K_ROPES
from rope_jax.papers.tables import Settings, Table, recipe_config, setting_text

SIDES = (128, 192, 224, 256, 320, 384, 480, 512)
LARGER = SIDES[3:]


def _run(key: Mapping[str, Any]) -> Run:
    return Run(key["model"], key["position"], f"thesis:variant={key['model']}")


def _six_heads(key: Mapping[str, Any]) -> Run:
    return _run(key | {"model": "vit_s16_h6"})


_H6 = (
    "trained as vit_s16_h6 in all rows: k_rope=16 needs 64 channels a head, which the 12 heads of "
    "ViT-Small do not have"
)
_SHARED = {k: f"axial_rope(k_rope={k},shared=True)" for k in (1, 4, 8, 16)}
_SHARED[2] = "axial_rope(shared=True)"
_OWN = {k: f"axial_rope(k_rope={k})" for k in (1, 4, 8, 16)} | {2: "axial_rope"}
_2D = {k: f"rope2d(k_rope={k})" for k in (2, 4, 8, 16)} | {1: "rope2d"}
_2D_OWN = {k: f"rope2d(k_rope={k},shared=False)" for k in (2, 4, 8, 16)}
_2D_OWN[1] = "rope2d(shared=False)"

_DESIGN = {
    ("2D RoPE", "Position co-ordinates"): "Absolute",
    ("2D RoPE", "Angles of rotation"): "$100^{-4j/d}$",
    ("2D RoPE", "Default k_{rope}"): "1",
    ("2D RoPE", "Shared \\theta for all heads"): "Yes",
    ("Axial RoPE", "Position co-ordinates"): "Scaled to $\\pm 1$",
    ("Axial RoPE", "Angles of rotation"): "pi 10^t, as in HDiT's code (generator=table31: printed)",
    ("Axial RoPE", "Default k_{rope}"): "2",
    ("Axial RoPE", "Shared \\theta for all heads"): "No",
}
_FIELDS = {
    "Total epochs": lambda c: c.epochs,
    "Warmup epochs": lambda c: c.optim.warmup_epochs,
    "Cooldown epochs": lambda c: c.optim.cooldown_epochs,
    "Per GPU batch size": lambda c: c.batch_size // 8,
    "Warmup LR": lambda c: c.optim.warmup_learning_rate,
    "Minimum LR": lambda c: c.optim.min_learning_rate,
    "Base LR": lambda c: c.optim.learning_rate,
    "LR schedule": lambda c: c.optim.schedule,
    "Weight decay": lambda c: c.optim.weight_decay,
    "EMA": lambda c: c.ema_decay is not None,
}
_AXES = {
    "B": SIZES[0],
    "Nh": SIZES[1],
    "H, W": SIZES[2],
    "C": SIZES[3],
}


def _recipe(variant: str):
    config = recipe_config(f"thesis:variant={variant}")
    return lambda key: setting_text(_FIELDS[key["setting"]](config))


ARTIFACTS = (
    Settings(
        "table_3.1",
        "Axial RoPE and 2D RoPE",
        ours=lambda key: _DESIGN[key["scheme"], key["setting"]],
    ),
    Drawing("figure_3.1", "Channels that a rotary scheme turns", content=channels),
    Table(
        "table_4.1",
        "Accuracy of 13 models with RPB, without position, and with Axial RoPE",
        run=_run,
        claims=[*above("axial_rope", "rpb", "none"), *above("rpb", "none")],
    ),
    Table(
        "table_4.2",
        "Accuracy at eight test sizes, angles shared by the heads",
        run=_six_heads,
        columns="resolution",
        note=_H6,
        claims=[
            *(as_good(_SHARED[k], _SHARED[1]) for k in (2, 4, 8)),
            *above(_SHARED[8], _SHARED[1], at=LARGER),
            *(c for k in _2D for c in above(_SHARED[k], _2D[k], at=LARGER)),
        ],
    ),
    Table(
        "table_4.3",
        "Accuracy at eight test sizes, angles of each head",
        run=_six_heads,
        columns="resolution",
        note=_H6,
        claims=[
            *(as_good(_OWN[k], _OWN[1]) for k in (2, 4, 8)),
            *above(_OWN[8], _OWN[2], at=(128, 192, *LARGER)),
            *(c for k in _OWN for c in above(_OWN[k], _2D_OWN[k], at=LARGER)),
        ],
    ),
    Table("table_4.4", "Throughput of 13 models", columns="kernel"),
    Settings(
        "table_A.1",
        "Problem sizes of the kernel",
        ours=lambda key: ", ".join(map(str, _AXES[key["setting"]])),
    ),
    Table(
        "table_A.2",
        "Speed of the fused rotation",
        columns="quantity",
        more=[
            {
                "precision": "16-32",
                "form": form,
                "over": "eager",
                "quantity": "average",
                "k_rope": k,
            }
            for form in ("compiled", "fused")
            for k in K_ROPES
            if k != 2  # of the table itself
        ],
        note="as printed, compiled is the change in percent and fused the ratio times 100; rows "
        "with k_rope turn 1/k_rope of the channels, the others half",
    ),
    Table(
        "table_B.1",
        "Generator and coordinates, angles of each head",
        run=_run,
        claims=above("axial_rope", "axial_rope(generator=exponential,coords=absolute)"),
    ),
    Table(
        "table_B.2",
        "Generator and coordinates, shared angles, all channels turned",
        run=_run,
        claims=above(
            "axial_rope(k_rope=1,shared=True,generator=exponential,coords=absolute)",
            "axial_rope(k_rope=1,shared=True)",
        ),
    ),
    Table(
        "table_B.3",
        "Shared angles with k_rope=8",
        run=_run,
        note="caption and column say shared angles, the text of B.2 says angles of each head; the "
        "numbers are those of shared angles (table 4.2)",
        claims=[as_good(_SHARED[8], "axial_rope")],
    ),
    Drawing("figure_C.1", "Angles of rotation by dimension", content=angles),
    Table(
        "table_D.1",
        "Accuracy and throughput of NAT-s and DiNAT-s",
        run=lambda key: _run(key) if key["quantity"] == "top1" else None,
        claims=[*above("axial_rope", "rpb", "none"), *above("rpb", "none")],
    ),
    Settings("table_E.1", "Recipe of Mini, Tiny and Small", ours=_recipe("vit_s16")),
    Settings("table_E.2", "Recipe of Base", ours=_recipe("vit_b16")),
    Table("table_F.1", "Accuracy on ReaL and V2", run=_run),
    Table("table_F.2", "Accuracy on ImageNet-A and -R", run=_run),
)
