import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.nn import log_sigmoid

from rope_jax.config import ConfigError, resolve
from rope_jax.data.images.device import normalise
from rope_jax.data.sources.folder import Files
from rope_jax.tasks.classification import (
    Classification,
    binary_loss,
    count_correct,
    soft_targets,
)


@pytest.mark.parametrize("before_erasing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_labels_are_mixed_like_their_images(before_erasing):
    """Targets are mixed by the fraction of the pixels; earlier erasing noise is mixed too."""
    mix = {"mixup": 0.8, "before_erasing": before_erasing}
    raw = {"mix": mix, "data": {"augment": "erase(p=1.0)"}, "model": {"num_classes": 10}}
    config, rng = resolve(raw | {"label_smoothing": 0.2}), np.random.default_rng(0)
    images = rng.integers(0, 256, (120, 8, 8, 3), dtype=np.uint8)
    label = rng.integers(0, 10, 120, dtype=np.int32)
    batch = {"image": images, "label": label, "epoch": np.zeros(120, np.int32)}
    batch["index"] = np.arange(120, dtype=np.int32)
    options = {"seed": 0, "key": jax.random.key(1)}
    prepare = jax.jit(lambda batch: Classification().prepare_batch(batch, config, **options))
    mixed, other = prepare(batch), label[::-1]
    target = (np.asarray(mixed["target"]) - 0.2 / 10) / 0.8
    row = np.flatnonzero(label != other)[0]
    fraction = target[row, label[row]]
    assert 0.05 < fraction < 0.95
    expected = fraction * np.eye(10)[label] + (1 - fraction) * np.eye(10)[other]
    np.testing.assert_allclose(target, expected, atol=1e-6)
    normalised = normalise(jnp.asarray(images), config.data.mean, config.data.std)
    equal_fraction = np.isclose(
        mixed["image"], fraction * normalised + (1 - fraction) * normalised[::-1], atol=1e-5
    ).mean()
    # A box has 0.02 to 1/3 of an image's pixels; mixed, an image has its own and its partner's.
    assert (0.75 < equal_fraction < 0.95) if before_erasing else (0.5 < equal_fraction < 0.75)


class Identity(nnx.Module):
    """A model whose logits are its images."""

    def __call__(self, images, **_):
        return images


def test_the_accuracy_uses_the_unmixed_labels():
    config = resolve({"loss": "softmax"})
    batch = {"label": jnp.array([0, 1, 1]), "target": jnp.full((3, 2), 0.5)}
    logits = jnp.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], jnp.bfloat16)
    batch["image"] = logits
    loss, accuracy = Classification().loss(Identity(), batch, config, key=jax.random.key(0))
    assert float(accuracy) == pytest.approx(2 / 3)
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(float(np.log1p(np.exp(-1)) + 0.5), rel=1e-6)


def test_training_images_have_one_label(tmp_path):
    """Several labels are for evaluation."""
    labels, classes = np.array([[0, 1], [1, -1]]), ["cat", "dog"]
    source = Files(tmp_path, ["a.png", "b.png"], labels, classes, name="mine", split="train")
    with pytest.raises(ConfigError, match="up to 2 labels for each training"):
        Classification().check(resolve({}), source.stream((8, 8)))


def test_padding_is_not_counted_and_any_label_is_right():
    first, falling = [9.0, 0, 0, 0, 0, 0], [5.0, 4, 3, 2, 1, 0]
    logits = jnp.array([first, falling, falling, first])
    mask = jnp.array([True, True, True, False])
    counts = count_correct(logits, jnp.array([0, 4, 5, 0]), mask)
    assert counts.tolist() == [1, 2, 3]
    several = jnp.array([[3, 0], [5, 4], [5, -1], [0, -1]])
    assert count_correct(logits, several, mask).tolist() == [1, 2, 3]
    assert count_correct(logits.at[:2, 3].set(jnp.nan), several, mask).tolist() == [0, 0, 3]


@pytest.mark.parametrize(
    ("weight", "first_present"), [(0.9, [1, 1, 0]), (1.0, [1, 0, 0]), (0.0, [0, 1, 0])]
)
def test_the_binary_loss_uses_every_present_class(weight, first_present):
    logits = jnp.array([[2.0, -1.0, 0.5], [0.0, 0.0, 3.0]])
    targets = soft_targets(jnp.array([0, 2]), jnp.array([1, 2]), weight, 3, 0.0)
    present = np.asarray([first_present, [0, 0, 1]])
    likelihoods = present * log_sigmoid(logits) + (1 - present) * log_sigmoid(-logits)
    expected = -float(likelihoods.mean())  # over classes and examples
    assert float(binary_loss(logits, targets)) == pytest.approx(expected, rel=1e-6)
