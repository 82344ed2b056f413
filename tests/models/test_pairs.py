"""Every scheme with every backbone: gradients on maps that are not square, or the reason why not.

Unmarked tests run each backbone and each scheme once; the full product is slow.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.registry import find_model
from tests.models.small import (
    abstract,
    check_gradients,
    compile_gradient,
    fill,
    pictures,
)
from tests.positions.schemes import ALL, DEFAULTS
from tests.slow import some_slow

# Options that make a model small, pixels of creation, pixels of the call. One model for each way in
# which backbones differ for a scheme: prefix tokens that take part in embeddings or do not, global
# attention, windows, neighbourhoods, dilation, attention of their own.
_PLAIN = {"width": 32, "heads": 2, "depth": 1}
_SMALL = ({**_PLAIN, "patch_size": 2}, (6, 10), (8, 4))
_FIXED = (_PLAIN, (32, 48), (64, 32))
_STAGES = ({"width": 16, "depths": (1, 1), "heads": (1, 2)}, (20, 28), (28, 12))
BACKBONES = {
    "cat_5": ({**_PLAIN, "operator": "released"}, *_FIXED[1:]),
    "cct_7_3x1": _FIXED,
    "ceit_t": _FIXED,
    "deit3_ti16": _SMALL,
    "deit_ti16": _SMALL,
    "dinat_mini": ({**_STAGES[0], "depths": (2, 1)}, *_STAGES[1:]),
    "dinov2_s14_reg": _SMALL,
    "nat_isotropic_s16": ({**_SMALL[0], "kernel_size": 3}, *_SMALL[1:]),
    "swin_t": ({**_STAGES[0], "window_size": 3}, *_STAGES[1:]),
    "t2t_vit_7": _FIXED,
    "vit_lite_6_4": _FIXED,
    "vit_s16": _SMALL,
}
# For a scheme, these are equivalent to some of the others.
ALIKE = {
    "beit_b16": _SMALL,
    "cvt_7_4": _FIXED,
    "dinov3_s16": _SMALL,
    "nat_s_tiny": _STAGES,
    "resformer_ti16": _SMALL,
    "swinv2_t": BACKBONES["swin_t"],
    "vit_adapter_ti16": (
        {**_PLAIN, "groups": (0,), "added": "last", "deform_heads": 2},
        *_FIXED[1:],
    ),
}

WINDOWS = ("dinat", "nat", "swin")
WITHOUT_TOKENS = ("cct", "cvt", "vit_adapter", "vit_s16")


# Backbones, schemes and options that they cannot have, and the reason.
REASONS = [
    (("cat_5",), ("alibi2d", "cpb", "irpe", "rpb"), "this position adds a bias to the logits of a"),
    (WINDOWS, ("decomposed",), "neighbourhoods and shifted windows have no rows and columns that"),
    (WINDOWS, ("irpe",), "a bias that depends on the query is no table of offsets, which windows"),
    (WINDOWS, ("key_norm=True",), "key_norm=True needs global attention"),
    (
        (*WINDOWS, *WITHOUT_TOKENS),
        ("prefix=True",),
        "prefix=True is the bias of class and register tokens, of which this model's",
    ),
]


def reason(name, text):
    """The reason why a backbone cannot have a scheme, or None."""
    for names, schemes, why in REASONS:
        if name.startswith(names) and any(scheme in text for scheme in schemes):
            return why
    return None


def make(name, text):
    options, size, _ = (BACKBONES | ALIKE)[name]
    return abstract(name, position=text, num_classes=3, image_size=size, **options)


def loss(model, images, key):
    logits = model(images, train=True, key=key)
    return -jax.nn.log_softmax(logits.astype(jnp.float32))[:, 1].sum()


def make_images(name):
    return pictures(*(BACKBONES | ALIKE)[name][2])


def test_every_family_is_covered():
    of = lambda names: {
        (find_model(name).family, find_model(name).options.__class__) for name in names
    }
    assert of(rope_jax.list_models()) == of(BACKBONES | ALIKE)


NAMES = [*BACKBONES, *ALIKE]
# Every scheme in a hierarchy (in isotropic backbones by `test_vit`), each kind in every backbone.
COMPILED = dict.fromkeys(
    [("swin_t", text) for text in ALL]
    + [(name, text) for name in NAMES for text in ("lape(ape)+rope_mixed", "rpb", "peg+string")]
)
COMPILED = [pair for pair in COMPILED if not reason(*pair)]
# Another scheme for each backbone, and one pair for each reason to refuse.
QUICK = {(name, DEFAULTS[5 * i % len(DEFAULTS)]) for i, name in enumerate(NAMES)}
QUICK |= {("cat_5", "rpb"), ("swin_t", "irpe"), ("swin_t", "decomposed")}
PAIRS = [(name, text) for name in NAMES for text in DEFAULTS]
TRACED = [pair for pair in PAIRS if pair in QUICK or pair not in COMPILED]


@pytest.mark.parametrize(("name", "text"), some_slow(TRACED, QUICK))
def test_schemes_fit_backbones_or_say_why_not(name, text):
    if refusal := reason(name, text):
        with pytest.raises(ValueError, match=re.escape(refusal)):
            make(name, text)
        return
    graph, params, rest = nnx.split(make(name, text), nnx.Param, ...)
    call = lambda *state: loss(nnx.merge(graph, *state), make_images(name), jax.random.key(0))
    gradients = jax.eval_shape(jax.grad(call), params, rest)
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(t)] for t in (gradients, params)]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), COMPILED)
def test_gradients_are_finite(name, text):
    run = compile_gradient(fill(make(name, text)), loss)
    value, gradients = run(make_images(name), jax.random.key(0))
    assert np.isfinite(value)
    check_gradients(gradients, silent=lambda path: True)
