import numpy as np
import pytest

from rope_jax.data import Images, batches, draws, split_augment
from rope_jax.data.draws import epoch_draws, example_draws
from rope_jax.data.images.augment import Augmentation, AugmentSplit, parse_crop, parse_loader
from rope_jax.data.images.crops import pad_and_crop

N, H, W = 40, 6, 9
IMAGES = np.random.default_rng(0).integers(
    1, 256, (N, H, W, 3), dtype=np.uint8
)  # no black, so that padding shows
IDS = np.arange(N)


def augment(images, ids, text, *, seed, epoch):
    """Applies the loader's augmentations to some examples of an epoch."""
    for number, augmentation in enumerate(parse_loader(text)):
        images = augmentation(
            images, epoch_draws(seed, epoch, N, f"{number} {augmentation.name}")[ids]
        )
    return images


def test_parse():
    assert parse_loader("none") == ()
    crop, flip = parse_loader("crop(pad=2) + flip(p=1)")
    assert crop == Augmentation("crop", (("pad", 2),))
    assert flip == Augmentation("flip", (("p", 1.0),))
    split = split_augment("crop(pad=2)+flip+three_augment+color_jitter+erase(p=0.5)")
    assert split.loader == "crop(pad=2)+flip"
    assert [augmentation.name for augmentation in split.pixels] == ["three_augment", "color_jitter"]
    assert [augmentation.name for augmentation in split.erasing] == ["erase"]
    assert split_augment("none") == AugmentSplit("none", (), ())
    assert split_augment("three_augment").loader == "none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "augmentation='' cannot be read"),
        ("crop(", "augmentation='crop.' cannot be read"),
        ("crop+", "cannot be read"),
        ("crop(pad=)", "cannot be read"),
        ("crop(pad=[1])", "cannot be read"),
        ("crop(pad='2')", "cannot be read"),
        ("blurr", "unknown augmentation 'blurr'; known: .*crop, flip, rand_augment"),
        ("flipp", "unknown augmentation 'flipp'; did you mean 'flip'"),
        ("crop(flip)", "crop takes options"),
        ("crop(side=2)", "crop has no option 'side'; known: pad"),
        ("crop(pad=x)", "pad must be a whole number"),
        ("crop(pad=1.5)", "pad must be a whole number"),
        ("crop(pad=1e999)", "pad must be a whole number"),
        ("crop(pad=1,pad=2)", "an option twice"),
        ("none+erase", "unknown augmentation 'none'"),
        ("flip+resized_crop", "another order than that of its stages: one crop"),
        ("centre+resized_crop", "another order"),
        ("rand_augment+flip", "another order"),
        ("erase+rand_augment", "another order"),
        ("rand_augment(k=3)", "no option 'k'; known: n, m, mstd, p, inc, interpolation"),
        ("rand_augment(m=11)", "m must be a number of at least 0 and at most 10, not 11"),
        (
            "rand_augment(interpolation=nearest)",
            "must be one of bilinear, bicubic, random, not",
        ),
        ("erase(p=2)", "p must be a number of at least 0 and at most 1, not 2"),
        ("color_jitter(contrast=3)", "contrast must be a number of .* at most 1, not 3"),
        *(
            (f"photometric({name}={value})", f"{name} must be .*, not {value}")
            for name, value in (("contrast", 2), ("brightness", 256), ("hue", 181), ("hue", 1.5))
        ),
    ],
)
def test_invalid_augmentations_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        split_augment(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crop(pad=0)", "pad must be a whole number of at least 1, not 0"),
        ("crop(pad=6)", "pad must be below both sides"),
        ("flip(p=1.5)", "p must be a number of at least 0 and at most 1, not 1.5"),
        ("resized_crop(scale_min=0)", "scale_min must be a number above 0 and at most 1, not 0"),
        ("resized_crop(ratio_min=2)", "is impossible"),
        ("centre(crop=1.5)", "crop must be a number above 0 and at most 1, not 1.5"),
        ("stretch(interpolation=cubic)", "one of nearest, bilinear, bicubic, lanczos, not 'cubic'"),
        ("flip+erase", "erase runs in the training step, not in the loader"),
    ],
)
def test_batches_refuse_options_out_of_range(text, message):
    images = Images(IMAGES, np.zeros(N, np.int32), "noise", "train", 1)
    with pytest.raises(ValueError, match=message):
        batches(images, batch_size=4, seed=0, augment=text)


@pytest.mark.parametrize("text", ["flip", "none", "centre+flip"])
def test_parse_crop_refuses_other_augmentations(text):
    assert parse_crop("centre(crop=1)").options == (("crop", 1.0),)
    with pytest.raises(ValueError, match="is not a crop"):
        parse_crop(text)


def test_crop_is_a_window_of_the_padded_image():
    pad = 2
    cropped = augment(IMAGES, IDS, f"crop(pad={pad})", seed=0, epoch=0)
    padded = np.pad(IMAGES, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (H, W), axis=(1, 2))
    windows = np.moveaxis(windows, 3, -1)  # [N, rows, columns, H, W, 3]
    equal = (windows == cropped[:, None, None]).all(axis=(3, 4, 5))
    assert (equal.sum(axis=(1, 2)) == 1).all()


def test_crop_positions_are_equally_likely():
    marked = np.zeros((1, 7, 7, 3), np.uint8)
    marked[0, 3, 3] = 255
    n, pad = 9_000, 1
    cropped = pad_and_crop(marked.repeat(n, 0), epoch_draws(0, 0, n, "test"), pad=pad)
    counts = (cropped[..., 0] > 0).sum(axis=0)[2:5, 2:5]
    assert counts.sum() == n
    assert abs(counts / (n / 9) - 1).max() < 0.12  # 3.6 standard deviations


def test_flip():
    np.testing.assert_array_equal(
        augment(IMAGES, IDS, "flip(p=1)", seed=0, epoch=0), IMAGES[:, :, ::-1]
    )
    np.testing.assert_array_equal(augment(IMAGES, IDS, "flip(p=0)", seed=0, epoch=0), IMAGES)
    flipped = (augment(IMAGES, IDS, "flip", seed=0, epoch=0) != IMAGES).any(axis=(1, 2, 3))
    assert 8 < flipped.sum() < 32


def test_random_streams_are_independent_and_fixed():
    drawn = [
        epoch_draws(seed, epoch, 100, stream)
        for seed in (0, 1)
        for epoch in (0, 1)
        for stream in ("order", "0 crop")
    ]
    assert len(np.unique(drawn)) == 800
    # Numbers written down: a resumed run must find them again under another version of numpy.
    assert epoch_draws(1, 2, 2, "order").tolist() == [6152314207982085954, 14131925135209654431]


def test_draws_of_examples_match_draws_of_epochs(monkeypatch):
    epochs, examples = np.array([3, 2, 3, 2, 3]), np.array([36, 0, 5, 5, 8])
    for stream in ("0 crop", "1 flip"):
        epoch_values = {epoch: epoch_draws(5, epoch, 37, stream) for epoch in (2, 3)}
        expected = [epoch_values[e][k] for e, k in zip(epochs.tolist(), examples, strict=True)]
        for largest in (37, 36):  # from whole epochs, and one by one
            monkeypatch.setattr(draws, "_LARGEST_EPOCH", largest)
            assert example_draws(5, epochs, examples, 37, stream).tolist() == expected
