import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.data.images import mixing


@pytest.fixture(scope="module")
def mixed_batches():
    """10,000 batches of a white and a black image, and the fractions of their original labels."""
    images = jnp.asarray(np.float32([1, 0]).repeat(12 * 16 * 3).reshape(2, 12, 16, 3))
    options = {"mixup": 0.8, "cutmix": 1.0, "prob": 0.6, "switch_prob": 0.25}
    draw = jax.jit(jax.vmap(functools.partial(mixing.mix, images, **options)))
    images, fractions = draw(jax.random.split(jax.random.key(0), 10_000))
    images, fractions = np.asarray(images)[..., 0], np.asarray(fractions)
    alone = fractions == 1
    return images, fractions, alone, ~alone & ((images == 0) | (images == 1)).all(axis=(1, 2, 3))


def test_mixup_cutmix_or_neither(mixed_batches):
    _, _, alone, cut = mixed_batches
    assert 0.38 < alone.mean() < 0.44  # 0.4, and boxes of no pixel
    assert 0.12 < cut.mean() < 0.16  # 0.15 without those


def test_mixup_fractions_have_a_beta_distribution(mixed_batches):
    images, fractions, alone, cut = mixed_batches
    images, fractions = images[~alone & ~cut], fractions[~alone & ~cut]
    expected = np.stack([fractions, 1 - fractions], 1)[..., None, None]
    np.testing.assert_allclose(images, np.broadcast_to(expected, images.shape), atol=1e-6)
    assert abs(fractions.mean() - 0.5) < 0.02
    assert abs(fractions.var() - 1 / (4 * (2 * 0.8 + 1))) < 0.005  # of Beta(a, a)


def test_cutmix_pastes_one_box_and_weights_labels_by_area(mixed_batches):
    images, fractions, _, cut = mixed_batches
    original, fractions = images[cut][:, 0], fractions[cut]
    np.testing.assert_array_equal(images[cut][:, 1], 1 - original)
    np.testing.assert_allclose(fractions, original.mean(axis=(1, 2)), atol=1e-6)
    box = original == 0
    sides = box.any(axis=1).sum(axis=1) * box.any(axis=2).sum(axis=1)
    np.testing.assert_array_equal(box.sum(axis=(1, 2)), sides)
    # A box of sides sqrt(1 - fraction) around any place, cut at the border: each side keeps
    # s - s^2 / 4 of its length on average. Sides are cut down to even numbers of pixels.
    side = np.sqrt(np.linspace(0, 1, 10001))
    expected = 1 - np.mean((side - side**2 / 4) ** 2)
    assert 0 < fractions.mean() - expected < 0.06


@pytest.mark.parametrize("groups", [1, 3])
def test_groups_are_mixed_independently(groups):
    """Each equals a separate batch with the key folded by its number; one group uses the key."""
    images = np.random.default_rng(1).random((12, 6, 8, 3), np.float32)
    labels, key, options = np.arange(12), jax.random.key(2), {"mixup": 0.8, "cutmix": 1.0}
    mix_groups = jax.jit(functools.partial(mixing.mix_groups, groups=groups, **options))
    mix = jax.jit(functools.partial(mixing.mix, **options))
    mixed, others, fractions = map(np.asarray, mix_groups(images, labels, key))
    assert len(np.unique(fractions)) == groups
    for group, rows in enumerate(np.split(np.arange(12), groups)):
        alone, fraction = mix(images[rows], jax.random.fold_in(key, group) if groups > 1 else key)
        # XLA may round a product and a sum at once in one program, and apart in the other.
        np.testing.assert_array_max_ulp(mixed[rows], np.asarray(alone), maxulp=2)
        np.testing.assert_array_equal(fractions[rows], np.full((len(rows), 1), fraction))
        np.testing.assert_array_equal(others[rows], labels[rows][::-1])
