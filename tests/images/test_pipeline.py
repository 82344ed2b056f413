import subprocess
import sys

import numpy as np
import pytest

from rope_jax.data import Images, batches, epoch_length, evaluation_batches
from rope_jax.data.order import batch_examples, permutation
from tests.images.streams import assert_same, join_batches, take


def numbered_images(n, size=4):
    """Images whose label is their example id, which is also written into their first pixel."""
    images = np.random.default_rng(0).integers(1, 256, (n, size, size, 3), dtype=np.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = np.arange(n) // 256, np.arange(n) % 256
    return Images(images, np.arange(n, dtype=np.int32), "numbered", "train", n)


def batch(images, step, **options):
    return next(batches(images, start_step=step, **options))


@pytest.mark.parametrize("batch_size", [1, 8, 50, 101, 230])
@pytest.mark.parametrize("start", [0, 17])
def test_epochs_have_every_example_once(batch_size, start):
    images = numbered_images(50)
    stream = batches(images, batch_size=batch_size, seed=0, start_step=start)
    joined_batch = join_batches(take(-(-200 // batch_size), stream))
    np.testing.assert_array_equal(joined_batch["image"], images.images[joined_batch["label"]])
    np.testing.assert_array_equal(joined_batch["index"], joined_batch["label"])
    assert joined_batch["epoch"].dtype == joined_batch["index"].dtype == np.int32
    place = start * batch_size + np.arange(len(joined_batch["label"]))
    np.testing.assert_array_equal(joined_batch["epoch"], place // 50)
    for epoch in range(
        place[0] // 50 + 1, place[-1] // 50
    ):  # those that are complete in the stream
        assert sorted(joined_batch["label"][joined_batch["epoch"] == epoch]) == list(range(50))


@pytest.mark.parametrize("ahead", [False, True])
def test_streams_resume_from_every_position(ahead):
    images, steps = numbered_images(1000), 40
    options = {"batch_size": 64, "seed": 1, "augment": "crop(pad=1)+flip"}
    uninterrupted = take(steps, batches(images, **options))
    for start in range(steps):
        resumed = batches(images, start_step=start, ahead=ahead, **options)
        expected = uninterrupted[start : start + 3]
        assert_same(take(len(expected), resumed), expected)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_shards_are_parts_of_a_batch(count):
    options = {"images": numbered_images(30), "batch_size": 8, "seed": 0, "augment": "flip"}
    for step in range(6):
        parts = [batch(step=step, shard=(k, count), **options) for k in range(count)]
        assert_same([join_batches(parts)], [batch(step=step, **options)])


@pytest.mark.parametrize("augment", ["crop(pad=2)+flip", "resized_crop(scale_min=0.3)+flip"])
def test_the_stream_does_not_depend_on_the_batch_size(augment):
    options = {"images": numbered_images(60), "seed": 9, "augment": augment}
    expected = join_batches(take(2, batches(batch_size=60, **options)))
    for size in (1, 7):
        result = join_batches(take(-(-120 // size), batches(batch_size=size, **options)))
        assert_same([{name: array[:120] for name, array in result.items()}], [expected])


def test_epoch_orders_differ_and_are_fixed():
    orders = [tuple(permutation(seed, epoch, 100).tolist()) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    # Recorded, as a resumed run must have the same order under another version of numpy.
    assert permutation(0, 0, 8).tolist() == [7, 0, 4, 5, 3, 2, 6, 1]
    with pytest.raises(ValueError, match="read-only"):  # as it is cached
        permutation(0, 0, 10)[0] = 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size must be .*, not 0"),
        ({"start_step": -1}, "step -1"),
        ({"seed": -1}, "seed must be .*, not -1"),
        ({"augment": "blur"}, "unknown augmentation 'blur'"),
        ({"augment": "flip+erase"}, "erase runs in the training step, not in the loader"),
        ({"shard": (2, 2)}, r"shard \(2, 2\)"),
        ({"shard": (0, 3)}, r"shard \(0, 3\)"),
        ({"repeats": 0}, "repeats must be .*, not 0"),
        ({"repeats": 3}, "repeats 3 of 10 images"),
        ({"bad_images": "ignore"}, "bad_images must be one of error, skip, not 'ignore'"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        batches(numbered_images(10), **{"batch_size": 4, "seed": 0, **wrong})


@pytest.mark.process
def test_a_forgotten_iterator_does_not_keep_the_program_alive():
    program = """
import numpy as np
from rope_jax.data import Images, batches
images = Images(np.zeros((9, 4, 4, 3), np.uint8), np.zeros(9, np.int32), "zeros", "train", 1)
stream = batches(images, batch_size=4, seed=0, ahead=True)
print(next(stream)["label"].sum())
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "0\n"
    assert run.stderr == ""


@pytest.mark.parametrize("batch_size", [1, 4, 10, 16])
def test_evaluation_batches(batch_size):
    images = numbered_images(10)
    got = list(evaluation_batches(images, batch_size=batch_size))
    assert [len(batch["mask"]) for batch in got] == [batch_size] * -(-10 // batch_size)
    everything = join_batches(got)
    assert not everything["image"][~everything["mask"]].any()
    expected = {"image": images.images, "label": images.labels, "index": np.arange(10)}
    assert_same([{name: everything[name][everything["mask"]] for name in expected}], [expected])


@pytest.mark.parametrize("count", [2, 3, 6])
def test_evaluation_shards_are_parts_of_a_batch(count):
    images = numbered_images(10)
    parts = [evaluation_batches(images, batch_size=6, shard=(k, count)) for k in range(count)]
    for full_batch, *pieces in zip(evaluation_batches(images, batch_size=6), *parts, strict=True):
        assert_same([join_batches(pieces)], [full_batch])
    with pytest.raises(ValueError, match="of divides the batch"):
        evaluation_batches(images, batch_size=6, shard=(0, 4))


def test_repeated_augmentation():
    count, size, repeats = 600, 48, 3
    length = epoch_length(count, repeats)
    assert (length, epoch_length(count)) == (512, 600)
    options = {"batch_size": size, "seed": 1, "count": count, "repeats": repeats}
    batches_in_turn = [batch_examples(step, **options) for step in range(32)]
    epochs, indices = np.array(batches_in_turn).swapaxes(0, 1).reshape(2, -1)
    for epoch in range(2):  # 32 batches of 48 are three epochs of 512
        ids = indices[epochs == epoch]
        assert len(ids) == len(np.unique(ids)) == length  # every copy has its own index
        often = np.bincount(ids % count, minlength=count)
        assert np.sort(often)[::-1].tolist() == [3] * 170 + [2] + [0] * 429  # 512 = 3 * 170 + 2
        assert set(np.flatnonzero(often)) == set(permutation(1, epoch, count)[:171].tolist())
    for step in range(8):  # no part of a batch has an example twice
        for parts in (3, 4, 8, 16):
            for part in np.split(batch_examples(step, **options)[1] % count, parts):
                assert len(np.unique(part)) == len(part)
    images = numbered_images(count)
    got = batch(images, 0, batch_size=size, seed=1, augment="flip+crop(pad=1)", repeats=repeats)
    np.testing.assert_array_equal(got["label"], got["index"] % count)
    copies = got["image"][got["label"] == got["label"][0]]
    assert len(copies) == 3
    assert len({copy.tobytes() for copy in copies}) > 1
