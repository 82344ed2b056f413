"""The isotropic vision transformers: schemes, symmetry, precision, drop path, features."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.models.blocks import drop_path
from rope_jax.models.layers import check_images
from tests.models.small import (
    abstract,
    check_gradients,
    compile_gradient,
    pictures,
    run,
    small_model,
)
from tests.positions.schemes import DEFAULTS
from tests.slow import some_slow

FAMILIES = ["deit_ti16", "deit3_ti16", "vit_s16", "nat_isotropic_s16"]
# Every scheme in one of the families; `test_pairs` traces all of them in all.
PAIRS = [(FAMILIES[index % len(FAMILIES)], text) for index, text in enumerate(DEFAULTS)]
PAIRS += [
    ("deit_ti16", "lape(ape,join=share)"),
    ("deit_ti16", "rpb(prefix=True)"),
    ("deit_ti16", "rpb(key_norm=True)"),
    ("vit_s16", "irpe+ape"),
    ("deit3_ti16", "gpe+lpe"),
    ("vit_s16", "liere(per_layer=False)"),
    ("vit_s16", "comrope(variant=ap,block=4)"),
    ("vit_s16", "string(variant=circulant)"),
    ("vit_s16", "spherical_rope(learnable=True)"),
]
# The tables of the last layer act on patches alone: they take part where patches are pooled.
ONE = {"irpe": "deit_ti16", "decomposed": "vit_s16"}
PAIRS = [(ONE.get(text, name), text) for name, text in PAIRS]


# One scheme of each kind.
LEARNING = ("lape(ape)", "rpb", "axial_rope_v1")
QUICK = [pair for pair in PAIRS if pair[1] in LEARNING]


@pytest.mark.parametrize(("name", "position"), some_slow(PAIRS, QUICK))
def test_schemes_learn_on_another_map(name, position):
    images = pictures(10, 18)  # 5 x 9 patches
    loss = lambda model: -jax.nn.log_softmax(model(images))[(0, 1), (1, 3)].sum()
    check_gradients(compile_gradient(small_model(name, position), loss)()[1])


def test_resize_replaces_the_tables():
    with jax.enable_x64(True):  # compilers round the two programs differently on some CPUs
        model = small_model("deit_ti16", "ape+rpb", dtype=jnp.float64)
        images = np.asarray(pictures(10, 18), np.float64)
        before, _ = run(model, images)
        model.resize((10, 18))
        assert [x.shape for x in jax.tree.leaves(nnx.state(model.position, nnx.Param))] == [
            (1 + 45, 48),
            (2, 3, 9, 17),
        ]
        np.testing.assert_allclose(run(model, images)[0], before, rtol=0, atol=1e-14)
        model.resize(8)  # pixels of both sides
        assert model.position.stage.grid == (4, 4)


# Drop path


def test_drop_path_drops_whole_examples_and_keeps_the_mean():
    branch = jnp.asarray(np.random.default_rng(0).standard_normal((4000, 3, 2)), jnp.float32)
    out = drop_path(branch, 0.25, jax.random.key(0))
    kept = np.asarray((out != 0).all(axis=(1, 2)))
    np.testing.assert_array_equal(out[~kept], 0)
    np.testing.assert_array_equal(out[kept], branch[kept] / 0.75)
    # The fraction kept is binomial: five standard deviations of sqrt(.75 * .25 / 4000) = 0.0068.
    assert abs(kept.mean() - 0.75) < 0.035


@pytest.mark.parametrize(
    ("name", "options", "rates"),
    [
        ("vit_s16", {"depth": 4, "drop_path": 0.3}, (0, 0.1, 0.2, 0.3)),
        ("vit_s16", {"depth": 2, "drop_path_schedule": "constant"}, (0.1, 0.1)),
        ("deit3_b16", {"depth": 3}, (0.1, 0.1, 0.1)),
        ("vit_b16", {"depth": 3}, (0, 0.2, 0.4)),
        ("swin_t", {}, np.linspace(0, 0.2, 12)),  # over the blocks of all stages
        ("swin_s", {}, np.linspace(0, 0.3, 24)),
        ("swinv2_b", {}, np.linspace(0, 0.5, 24)),
    ],
)
def test_drop_path_rates_of_blocks(name, options, rates):
    parts = abstract(name, **options).parts().values()
    np.testing.assert_allclose([x for part in parts for x in part.rates], rates, rtol=1e-12)


def test_branches_of_a_block_are_dropped_independently():
    model = small_model("vit_s16", depth=1, drop_path=0.5, drop_path_schedule="constant")
    images = jnp.tile(pictures(6, 10, batch=1), (64, 1, 1, 1))
    logits = np.asarray(run(model, images, True, jax.random.key(0))[0])
    # 64 equal images see four cases: neither branch dropped, the first, the second, both. All
    # four are missed with 4 * .75**64 < 1e-7.
    assert len(np.unique(logits.round(3), axis=0)) == 4


# Images


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((1, 4, 6, 4), np.float32),
        np.zeros((4, 6, 3), np.float32),
        np.zeros((1, 3, 4, 6), np.float32),
        np.zeros((0, 4, 6, 3), np.float32),
        np.zeros((1, 4, 0, 3), np.float32),
        np.zeros((1, 4, 6, 3), np.uint8),
    ],
)
def test_invalid_images_are_refused(images):
    message = re.escape(f"images have shape {images.shape} and dtype {images.dtype}")
    with pytest.raises(ValueError, match=message):
        check_images(jnp.asarray(images))
