"""Training at several resolutions of each example, and distillation between them (ResFormer)."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.config import load_recipe, resolve
from rope_jax.tasks.classification import DISTANCES, Classification
from rope_jax.training.optim import learning_rate_schedule
from rope_jax.training.setup import prepare, training_batches
from tests.parity import official
from tests.parity.noise import noise
from tests.training.recipe import assert_refused, tiny

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "data" / "resformer_training.json").read_text()
)


def take_batches(count, **changes):
    run, _ = prepare(tiny(**changes))
    batches, _ = training_batches(run, 0)
    return [next(batches) for _ in range(count)]


def test_all_sizes_have_the_same_examples_with_other_draws():
    batch, *_ = take_batches(1, data__more_sizes=(8, (4, 6)))
    assert batch["image"].shape == batch["image_1"].shape == (120, 8, 8, 3)
    assert batch["image_2"].shape == (120, 4, 6, 3)
    differ = (batch["image"] != batch["image_1"]).any(axis=(1, 2, 3))
    assert 0.7 < differ.mean() < 1  # crops at 9 places
    (without,) = take_batches(1, data__more_sizes=(8,), data__augment="none")
    np.testing.assert_array_equal(without["image"], without["image_1"])
    np.testing.assert_array_equal(
        without["image"], take_batches(1, data__augment="none")[0]["image"]
    )


def test_all_sizes_are_mixed_with_one_draw():
    config = resolve(
        {"mix": {"cutmix": 1.0}, "data": {"more_sizes": (4, 16)}, "model": {"num_classes": 2}}
    )
    rng = np.random.default_rng(0)
    colours = np.uint8([0, 255])[:, None, None, None]
    batch = {
        name: np.broadcast_to(colours, (2, side, side, 3))
        for name, side in (("image", 8), ("image_1", 4), ("image_2", 16))
    }
    batch |= {"label": np.int32([0, 1]), "epoch": np.zeros(2, np.int32), "index": np.int32([0, 1])}
    options = {"config": config, "seed": 0}
    prepare_batch = jax.jit(functools.partial(Classification().prepare_batch, **options))
    for key in jax.random.split(jax.random.key(int(rng.integers(99))), 8):
        mixed = prepare_batch(batch, key=key)
        assert [mixed[name].shape[1] for name in ("image", "image_1", "image_2")] == [16, 8, 4]
        largest = np.asarray(mixed["image"])[0, :, :, 0] > 0  # pixels of the other image
        assert mixed["target"][0, 1] == pytest.approx(largest.mean())
        for name, step in (("image_1", 2), ("image_2", 4)):
            # The edges of the box are divided by the step and rounded down.
            expected = largest[step - 1 :: step, step - 1 :: step]
            np.testing.assert_array_equal(np.asarray(mixed[name])[0, :, :, 0] > 0, expected)


def distances(student, teacher):
    """The three distances in NumPy."""
    whitened = (teacher - teacher.mean(1, keepdims=True)) / np.sqrt(
        teacher.var(1, keepdims=True) + 1e-6
    )
    gap = np.abs(student - whitened)
    norms = np.linalg.norm(student, axis=1) * np.linalg.norm(teacher, axis=1)
    return {
        "smooth_l1": np.where(gap < 1, gap**2 / 2, gap - 0.5).mean(),
        "l2": ((student - teacher) ** 2).mean(),
        "cosine": 1 - ((student * teacher).sum(1) / norms).mean(),
    }


@pytest.mark.usefixtures("x64")
def test_distances_match_their_definitions():
    student, teacher = 2 * np.random.default_rng(0).standard_normal((2, 5, 7))
    for name, expected in distances(student, teacher).items():
        assert float(DISTANCES[name](jnp.asarray(student), jnp.asarray(teacher))) == pytest.approx(
            expected, rel=1e-12
        )


class Pixels(nnx.Module):
    """A model whose tokens, features and logits are the first two rows of pixels."""

    def __call__(self, images, **_):
        return images[:, :2, 0, 0]


def test_each_size_learns_from_the_next_larger_one():
    config = resolve({"data": {"more_sizes": (4, 2)}, "distill": "l2", "distill_from": "logits"})
    rng = np.random.default_rng(0)
    batch = {
        name: jnp.asarray(rng.random((3, side, side, 3)))
        for name, side in (("image", 8), ("image_1", 4), ("image_2", 2))
    }
    batch |= {"label": jnp.array([0, 1, 1]), "target": jnp.full((3, 2), 0.5)}
    loss = lambda batch: Classification().loss(Pixels(), batch, config, key=jax.random.key(0))[0]
    logits = [np.asarray(batch[name])[:, :2, 0, 0] for name in ("image", "image_1", "image_2")]
    cross = [(np.log(np.exp(x).sum(1)) - x.mean(1)).mean() for x in logits]
    apart = [((a - b) ** 2).mean() for a, b in zip(logits[1:], logits, strict=False)]
    assert float(loss(batch)) == pytest.approx((sum(cross) + sum(apart)) / 3, rel=1e-5)
    # The teacher has no gradient: the largest images have that of their own loss alone.
    gradient = jax.grad(lambda image: loss(batch | {"image": image}))(batch["image"])
    alone = resolve({})
    expected = jax.grad(
        lambda image: Classification().loss(
            Pixels(), batch | {"image": image}, alone, key=jax.random.key(0)
        )[0]
    )(batch["image"])
    np.testing.assert_allclose(gradient, expected / 3, atol=1e-7)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", list(GOLDEN["cases"]))
def test_one_step_is_that_of_the_official_code(case):
    """Losses and norms of gradients; tables of the official code are scaled by 1 + 1e-6."""
    kind, target = case.split(",")
    raw = {"label_smoothing": 0.1, "data": {"more_sizes": tuple(GOLDEN["sizes"][1:])}}
    raw["distill"] = None if kind == "none" else kind.replace("-", "_")
    raw["distill_from"] = {"cls": "feature", "gap": "tokens", "logit": "logits"}[target]
    config = resolve(raw)
    model = rope_jax.create_model("resformer_ti16", drop_path=0.0, dtype=jnp.float64)
    rope_jax.convert_state_dict(
        model, official.state_dict("resformer_ti16_224"), source="resformer"
    )
    labels = jnp.asarray(GOLDEN["labels"])
    batch = {
        "label": labels,
        "target": 0.9 * jax.nn.one_hot(labels, 1000, dtype=jnp.float64) + 1e-4,
    }
    for number, (side, seed) in enumerate(zip(GOLDEN["sizes"], GOLDEN["seeds"], strict=True)):
        images = noise(seed, (2, 3, side, side)).transpose(0, 2, 3, 1)
        batch[f"image_{number}" if number else "image"] = jnp.asarray(images, jnp.float64)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        merged = nnx.merge(graph, params, rest)
        return Classification().loss(merged, batch, config, key=jax.random.key(0))[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    expected = GOLDEN["cases"][case]
    assert float(value) == pytest.approx(expected["loss"], rel=1e-6)
    squares = [float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient)]
    assert sum(squares) ** 0.5 == pytest.approx(expected["gradient_norm"], rel=1e-6)


@pytest.mark.parametrize(
    ("variant", "golden"), list(zip("sb", GOLDEN["learning_rate"], strict=True))
)
def test_the_schedule_of_the_recipe_is_the_official_one(variant, golden):
    config = resolve(load_recipe(f"resformer:variant={variant}"))
    steps = 1000.0
    schedule = learning_rate_schedule(config.optim, epochs=config.epochs, steps_per_epoch=steps)
    for epoch, rate in GOLDEN["learning_rate"][golden]:
        assert float(schedule(round(epoch * steps))) == pytest.approx(rate, rel=2e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distill": "l2"}, "distill=l2.*more_sizes"),
        ({"distill_from": "tokens"}, "distill_from=tokens needs --config.distill"),
        (
            {"distill": "l2", "data__more_sizes": (32,), "data__image_size": 64}
            | {"model__name": "ceit_t", "model__options": "width=48,heads=3,depth=1"},
            "unlike ceit_t: use logits",
        ),
        ({"data__more_sizes": (7,)}, "divisible.*more_sizes"),
        ({"data__more_sizes": (4,), "data__on_device": True}, "more_sizes.*on_device"),
        ({"data__more_sizes": (4,), "data__augment": "crop(pad=5)"}, "images of 4 x 4.*augment"),
    ],
)
def test_combinations_that_are_not_supported(changes, words):
    assert_refused(words, **changes)
