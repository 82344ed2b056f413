import numpy as np
import pytest

from rope_jax.data import Images, batches, draws, split_augment
from rope_jax.data.draws import epoch_draws, example_draws
from rope_jax.data.images.augment import parse_loader
from rope_jax.data.images.crops import pad_and_crop

N, H, W = 40, 6, 9
IMAGES = np.random.default_rng(0).integers(
    1, 256, (N, H, W, 3), dtype=np.uint8
)  # no black, so that padding shows


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
        ("crop(pad=0)", "pad must be a whole number of at least 1, not 0"),
        ("crop(pad=6)", "pad must be below both sides"),
        ("flip(p=1.5)", "p must be a number of at least 0 and at most 1, not 1.5"),
        ("resized_crop(scale_min=0)", "scale_min must be a number above 0 and at most 1, not 0"),
        ("resized_crop(ratio_min=2)", "is impossible"),
        ("centre(crop=1.5)", "crop must be a number above 0 and at most 1, not 1.5"),
        ("stretch(interpolation=cubic)", "one of nearest, bilinear, bicubic, lanczos, not 'cubic'"),
    ],
)
def test_invalid_augmentations_are_refused(text, message):
    images = Images(IMAGES, np.zeros(N, np.int32), "noise", "train", 1)
    with pytest.raises(ValueError, match=message):
        batches(images, batch_size=4, seed=0, augment=split_augment(text).loader)


def test_crops_are_equally_likely_windows_of_the_padded_image():
    n, pad = 9_000, 1
    cropped = pad_and_crop(IMAGES[:1].repeat(n, 0), epoch_draws(0, 0, n, "test"), pad=pad)
    padded = np.pad(IMAGES[0], ((pad, pad), (pad, pad), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (H, W, 3))[:, :, 0]
    equal = (windows == cropped[:, None, None]).all(axis=(3, 4, 5))
    assert (equal.sum(axis=(1, 2)) == 1).all()
    assert abs(equal.mean(axis=0) * 9 - 1).max() < 0.12  # 3.6 standard deviations


@pytest.mark.parametrize(("p", "low", "high"), [(0, 0, 0), (0.5, 9, 31), (1, N, N)])
def test_flip(p, low, high):
    (flip,) = parse_loader(f"flip(p={p})")
    images = flip(IMAGES, epoch_draws(0, 0, N, "flip"))
    flipped = (images != IMAGES).any(axis=(1, 2, 3))
    assert low <= flipped.sum() <= high
    np.testing.assert_array_equal(images[flipped], IMAGES[flipped][:, :, ::-1])


def test_random_streams_are_independent():
    drawn = [
        epoch_draws(seed, epoch, 100, stream)
        for seed in (0, 1)
        for epoch in (0, 1)
        for stream in ("order", "0 crop")
    ]
    assert len(np.unique(drawn)) == 800


def test_draws_of_examples_match_draws_of_epochs(monkeypatch):
    epochs, examples = np.array([3, 2, 3, 2, 3]), np.array([36, 0, 5, 5, 8])
    for stream in ("0 crop", "1 flip"):
        epoch_values = {epoch: epoch_draws(5, epoch, 37, stream) for epoch in (2, 3)}
        expected = [epoch_values[e][k] for e, k in zip(epochs.tolist(), examples, strict=True)]
        for largest in (37, 36):  # from whole epochs, and one by one
            monkeypatch.setattr(draws, "_LARGEST_EPOCH", largest)
            assert example_draws(5, epochs, examples, 37, stream).tolist() == expected
