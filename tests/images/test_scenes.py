import jax
import numpy as np
import pytest

from rope_jax import data
from rope_jax.data.device_batches import DeviceBatches, take
from rope_jax.data.sources.scenes import LabelMaps, draw_scene


def test_scenes_depend_on_split_number_and_size_only():
    scene, again = (draw_scene("train", 3, (48, 64)) for _ in range(2))
    np.testing.assert_array_equal(scene.image, again.image)
    np.testing.assert_array_equal(scene.masks, again.masks)
    for other in (("test", 3, (48, 64)), ("train", 4, (48, 64)), ("train", 3, (64, 48))):
        assert not np.array_equal(draw_scene(*other).image, scene.image)


def test_digits_are_visible_and_labelled():
    """Masks are disjoint, and 70 % of each digit's ink is visible."""
    scene_list = [draw_scene("train", i, (64, 64)) for i in range(40)]
    for scene in scene_list:
        assert scene.masks.sum(0).max() <= 1
        for digit, mask in zip(scene.digits, scene.masks, strict=True):
            assert (scene.labels[mask] == 1 + digit).all()
            assert mask.sum() >= 0.7 * 20
        away = ~scene.masks.any(0)
        assert (scene.labels[away] == 0).all()
        ground = scene.image[away].mean(0)
        assert all(np.abs(scene.image[m].mean(0) - ground).max() > 25 for m in scene.masks)
    background_fraction = np.mean([s.labels == 0 for s in scene_list])
    assert 0.86 < background_fraction < 0.95
    assert {d for s in scene_list for d in s.digits.tolist()} == set(range(10))


def test_digit_counts_are_equally_likely():
    numbers = [len(draw_scene("train", i, (64, 64)).digits) for i in range(400)]
    counts = np.bincount(numbers, minlength=7)
    assert len(counts) == 7
    assert counts[:2].sum() <= 4  # scenes without place for another digit
    assert (counts[2:] > 60).all(), counts


def test_larger_scenes_have_more_digits_of_the_same_size():
    small, large = (
        [draw_scene("train", i, (side, side)).masks for i in range(20)] for side in (64, 128)
    )
    assert 3 < sum(map(len, large)) / sum(map(len, small)) < 5
    area = [np.concatenate(masks).sum((1, 2)).mean() for masks in (small, large)]
    assert 0.8 < area[1] / area[0] < 1.25


@pytest.mark.usefixtures("few_scenes")
def test_scene_sets_have_the_requested_size():
    images = data.load("scenes", split="test", image_size=(32, 48))
    assert images.images.shape == (6, 32, 48, 3)
    assert images.class_names == ("background", *"0123456789")
    assert data.load("scenes").size == (64, 64)


@pytest.mark.usefixtures("few_scenes")
def test_scenes_refuse_unsuitable_arguments():
    images = data.load("scenes", image_size=(16, 24))
    with pytest.raises(ValueError, match=r"on_device=True supports .*, not resized_crop"):
        DeviceBatches(images, batch_size=2, seed=0, augment="resized_crop")
    with pytest.raises(ValueError, match="8x64 pixels have no room"):
        draw_scene("train", 0, (8, 64))
    with pytest.raises(ValueError, match="'scenes' takes no path"):
        data.load("scenes", "here")


@pytest.mark.usefixtures("few_scenes")
def test_labels_are_flipped_with_their_images_on_host_and_device():
    images = data.load("scenes", image_size=(16, 24))
    options = {"batch_size": 12, "seed": 0, "augment": "flip"}
    batch = next(data.batches(images, **options))
    flipped = (batch["image"] != images.images[batch["index"]]).any((1, 2, 3))
    assert 0 < flipped.sum() < 12
    labels = images.labels[batch["index"]]
    expected = np.where(flipped[:, None, None], labels[:, :, ::-1], labels)
    np.testing.assert_array_equal(batch["label"], expected)
    on_device = next(DeviceBatches(images, **options))
    device_batch = jax.jit(take, static_argnums=3)(images.images, images.labels, on_device, "flip")
    for name in ("image", "label"):
        np.testing.assert_array_equal(device_batch[name], batch[name])


@pytest.mark.usefixtures("few_scenes")
def test_scenes_are_cropped_with_their_labels():
    images = data.load("scenes", image_size=(32, 48))
    augment = "scaled_crop(low=0.7,high=1.0,short=32,long=48)"
    batch = next(data.batches(images, batch_size=12, seed=0, augment=augment))
    assert batch["label"].shape == (12, 32, 48)
    assert 0.02 < ((batch["label"] > 0) & (batch["label"] < 255)).mean() < 0.2
    assert batch["extent"].min() < 32


@pytest.mark.parametrize(
    ("shape", "label", "message"),
    [((2, 4, 5), 0, r"labels are uint8 \[2, 4, 5\]"), ((2, 4, 6), 3, "has label 3")],
)
def test_label_maps_refuse_other_sizes_and_classes(shape, label, message):
    images, labels = np.zeros((2, 4, 6, 3), np.uint8), np.full((2, 4, 6), 255, np.uint8)
    LabelMaps(images, labels, "mine", "train", 3)
    with pytest.raises(ValueError, match=message):
        LabelMaps(images, np.full(shape, label, np.uint8), "mine", "train", 3)
