"""Costs of models with heads: counts by hand, and those of the traced programs."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import rope_jax
from rope_jax.models import cost as module
from rope_jax.models.cost import cost
from rope_jax.models.heads import HEADS
from rope_jax.models.heads.head import Head

TINY = {"width": 8, "heads": 1, "depth": 4, "image_size": 64, "num_classes": 3}
SIZE = (64, 96)  # 4 x 6 tokens
BACKBONE = 24 * 768 * 8 + 4 * (25 * 12 * 8**2 + 2 * 25**2 * 8)
ADAPTER = {"groups": (0, 1, 2, 3), "deform_heads": 1, "prior_width": 4}
# Areas of UperNet's maps: 384, 96, 24 and 6.
UPERNET = {
    "pooling": (1 + 4 + 9 + 36) * 8 * 4 + 6 * 9 * (8 + 4 * 4) * 4,
    "laterals": (384 + 96 + 24) * 8 * 4,
    "smooth": (384 + 96 + 24) * 9 * 4**2,
    "fuse": 384 * 9 * (4 * 4) * 4,
    "classify": 384 * 4 * 3,
    "auxiliary": 24 * (9 * 8 * 5 + 5 * 3),
}


def abstract(name, head, **settings):
    return nnx.eval_shape(lambda: rope_jax.create_model(name, head=head, **TINY | settings))


@pytest.fixture(scope="module")
def upernet():
    return abstract("deit_ti16", "upernet(width=4,auxiliary_width=5)")


def counts(model, depth):
    return {row.module: row.multiply_adds for row in cost(model, SIZE, depth=depth)}


def test_the_linear_head_by_hand():
    found = counts(abstract("deit_ti16", "linear(cells=2)"), 1)
    assert found == {"backbone": BACKBONE, "head": 24 * 8 * 4 * 3}


def test_segmenter_by_hand():
    found = counts(abstract("deit_ti16", "segmenter(depth=2,head_dim=4)"), 1)
    block = 27 * 12 * 8**2 + 2 * 27**2 * 8  # of 24 patches and 3 classes
    masks = 24 * 8**2 + 3 * 8**2 + 24 * 3 * 8
    assert found == {"backbone": BACKBONE, "head": 24 * 8**2 + 2 * block + masks}


def test_upernet_by_hand(upernet):
    found = counts(upernet, 2)
    assert sum(n for name, n in found.items() if name.startswith("backbone.")) == BACKBONE
    assert {name: n for name, n in found.items() if name.startswith("head.")} == {
        f"head.{name}": n for name, n in UPERNET.items()
    }
    necks = {name: n for name, n in found.items() if name.startswith("neck.")}
    transposed = 4 * 8**2  # of one token
    up2 = 4 * 24 * transposed
    assert necks == {
        "neck.norm": 0, "neck.up": 24 * transposed, "neck.up1": 24 * transposed, "neck.up2": up2,
    }  # fmt: skip


def test_parameters_of_all_parts_are_counted(upernet):
    rows = cost(upernet, SIZE, depth=1)
    found = {row.module: row.parameters for row in rows}
    assert found["neck"] == 3 * (4 * 8**2 + 8) + 2 * 8
    convs = 4 * 8 * 4 + 9 * (8 + 4 * 4) * 4 + 3 * 8 * 4 + 3 * 9 * 4**2 + 9 * 16 * 4
    norms = 2 * 4 * (4 + 1 + 3 + 3 + 1)
    auxiliary = 9 * 8 * 5 + 2 * 5 + 5 * 3 + 3
    assert found["head"] == convs + norms + 4 * 3 + 3 + auxiliary


def traced(model):
    """Multiply-adds of the products and convolutions in a model's program.

    Resizing and pooling, in heads.maps, are the only products of the highest precision.
    """
    graph, state = nnx.split(model)
    images = jax.ShapeDtypeStruct((1, *SIZE, 3), jnp.float32)

    def run(state, images):
        model = nnx.merge(graph, state)
        return model.head(model.head_maps(images))

    return multiply_adds(jax.make_jaxpr(run)(state, images).jaxpr)


def multiply_adds(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        params, name = equation.params, equation.primitive.name
        inner = sum(multiply_adds(sub) for sub in jaxprs_in_params(params))
        total += inner * params.get("length", 1)
        if name == "dot_general" and params["precision"] is None:
            (contracted, _), _ = params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
        elif name == "conv_general_dilated":
            kernel, layout = equation.invars[1].aval, params["dimension_numbers"].rhs_spec
            total += equation.outvars[0].aval.size * kernel.size // kernel.shape[layout[0]]
    return total


@pytest.mark.parametrize(
    ("name", "head", "settings"),
    [
        pytest.param("deit_ti16", "segmenter(head_dim=4)", {}, marks=pytest.mark.slow),
        ("deit_ti16", "upernet(width=4,neck=multilevel,auxiliary_map=3)", {}),
        pytest.param("deit_ti16", "upernet(width=4,neck=none)", {}, marks=pytest.mark.slow),
        pytest.param("ceit_t", "linear", {"position": "none"}, marks=pytest.mark.slow),
        pytest.param("cct_14_7x2", "linear", {"position": "none"}, marks=pytest.mark.slow),
        pytest.param(
            "swin_t",
            "upernet(width=4)",
            {"heads": (1, 2, 4, 8), "depth": None},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_costs_are_those_of_the_program(name, head, settings):
    settings = {key: value for key, value in (TINY | settings).items() if value is not None}
    model = nnx.eval_shape(lambda: rope_jax.create_model(name, head=head, **settings))
    depthwise = sum(
        variable.size * 24  # CeiT's depthwise convolutions are nine shifted products
        for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
        if variable.shape[:3] == (3, 3, 1)
    )
    assert sum(counts(model, 1).values()) == traced(model) + depthwise


def test_costs_of_vit_adapter_have_its_convolutions_and_points():
    model = abstract("vit_adapter_ti16", "upernet(width=4,auxiliary_width=0)", **ADAPTER)
    found = sum(counts(model, 1).values())
    branch = 8 * 12 + 24 + 2 * 3  # tokens of strides 8, 16 and 32
    injected = 4 * 4 * 24 * 3 * 4 * 8  # four groups; four corners, three maps, four points
    extracted = 6 * 4 * branch * 1 * 4 * 8  # three groups with one extractor, one with three
    depthwise = 6 * branch * 9 * 2
    assert found == traced(model) + injected + extracted + depthwise


def test_heads_that_are_not_counted_are_refused(monkeypatch):
    class Own(HEADS["linear"].family):
        places = Head.places

    entry = HEADS["linear"]
    monkeypatch.setitem(HEADS, "own", type(entry)(Own, entry.options))
    model = abstract("deit_ti16", "own")
    with pytest.raises(ValueError, match=r"head 'own' are not counted: pass the model's backbone"):
        cost(model, SIZE)
    assert sum(row.multiply_adds for row in cost(model.backbone, SIZE)) == BACKBONE


def test_the_command_counts_heads(capsys):
    module.main(
        ["deit_ti16", "--head=linear", "--num_classes=5", "--image_size=32x48", "--depth=2"]
    )
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:])
    assert rows["head.classify"].split() == ["965", f"{6 * 192 * 5:,}"]
