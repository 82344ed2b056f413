"""The training step and its batches: resumed augmentation, gradients in parts, mixing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rope_jax.runs.run
from rope_jax import data
from rope_jax.data.device_batches import take
from rope_jax.data.images.device import normalise
from rope_jax.evaluate import read_results
from rope_jax.system.sharding import put_batch
from rope_jax.training.folder import Run
from rope_jax.training.setup import initial_state, prepare, training_batches
from rope_jax.training.signals import Signals
from rope_jax.training.step import make_step
from rope_jax.training.trees import tree_hash
from tests.slow import some_slow
from tests.training.recipe import CEIT, advance, assert_refused, replace_settings, start, tiny

AUGMENT = "crop(pad=1)+erase(p=0.5)"


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True])
def test_augmentations_resume_bit_for_bit(on_device):
    """Also if the set moves to the device in between."""
    run, state, step = start(data__augment=AUGMENT, mix__mixup=0.8, mix__cutmix=1.0)
    again = dataclasses.replace(
        run, config=replace_settings(run.config, "data", on_device=on_device)
    )
    middle, _ = advance(run, state, step, 0, 2)
    uninterrupted, _ = advance(run, state, step, 0, 4)
    resumed, _ = advance(again, middle, step, 2, 4)
    assert tree_hash(resumed) == tree_hash(uninterrupted)


@pytest.mark.parametrize(
    ("repeats", "augment", "side"),
    [
        (1, "crop(pad=2)+flip(p=0.3)", 8),
        (3, "resized_crop(interpolation=random)+flip(p=0.3)", 8),
        (1, "resized_crop", 6),  # from digits of 8 x 8 pixels
    ],
)
def test_sets_on_the_device_give_equal_batches(repeats, augment, side):
    changes = {"data__augment": augment, "data__repeats": repeats, "data__image_size": (side, side)}
    run, _ = prepare(tiny(data__on_device=True, **changes))
    places, resident = training_batches(run, 10)  # across the border of an epoch
    batches = data.batches(
        run.images, batch_size=120, seed=0, start_step=10, augment=augment, repeats=repeats
    )
    make_batch = jax.jit(lambda batch: take(*resident["set"], batch, augment, (side, side)))
    for _ in range(4):
        expected = next(batches)
        result = make_batch(next(places))
        for name in expected:
            np.testing.assert_array_equal(result[name], expected[name])
            assert result[name].dtype == expected[name].dtype


@pytest.mark.parametrize(
    "changes", some_slow([{"ema_decay": 0.9}, CEIT], [CEIT]), ids=["ViT", "batch statistics"]
)
def test_the_step_matches_a_reference(changes):
    by_gradient = {"optim__name": "sgd", "optim__learning_rate": 0.1, "optim__warmup_epochs": 0.0}
    run, model = prepare(tiny(**changes | by_gradient))
    state = initial_state(run, model)
    batch = put_batch(next(training_batches(run, 0)[0]), run.mesh)
    new, metrics = make_step(run)(jax.tree.map(jnp.copy, state), batch)
    graph, _, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def reference(state):
        def loss(params):
            model = nnx.merge(graph, params, rest)
            images = normalise(batch["image"], run.config.data.mean, run.config.data.std)
            logits = model(images, train=True, key=jax.random.key(0))  # one block: no drop path
            likelihoods = jax.nn.log_softmax(logits)[jnp.arange(120), batch["label"]]
            return -likelihoods.mean(), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

        loss_and_stats, gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, _ = run.optimizer.update(gradients, state["opt"], state["params"])
        return (
            loss_and_stats,
            optax.tree.norm(gradients),
            optax.apply_updates(state["params"], updates),
        )

    (loss, stats), norm, params = reference(state)
    assert_close = lambda result, expected: np.testing.assert_allclose(
        result, expected, rtol=1e-7, atol=1e-6
    )
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    jax.tree.map(assert_close, new["params"], params)
    average = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["params"], params)
    jax.tree.map(assert_close, new["ema"], average)
    jax.tree.map(assert_close, new.get("stats", {}), stats)


def test_accumulated_parts_match_the_whole_batch():
    single, in_parts = (advance(*start(accumulate=parts), 0, 3) for parts in (1, 4))
    assert in_parts[1] == pytest.approx(single[1], rel=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, in_parts[0], single[0])


def test_requesting_other_weights_repeats_the_evaluation(tmp_path):
    run, state, _ = start(ema_decay=0.9, eval__resolutions=())
    for averaged, end in (
        (True, "averaged weights (EMA)"),
        (False, "weights of the last step"),
    ):
        config = replace_settings(run.config, "eval", ema=averaged)
        with Run.open(tmp_path, "train") as opened:
            changed = dataclasses.replace(run, config=config)
            rope_jax.runs.run.finish(changed, state, opened, Signals())
        (row,) = read_results(tmp_path)["eval"]
        assert row["protocol"].endswith(end)


def test_mixing_ends_after_its_last_epoch():
    """The second epoch begins with step 12; before that, mixing changes the loss."""
    plain_run, state, plain = start()
    _, _, mixed = start(mix__cutmix=1.0, mix__off_epoch=1.0)
    for first, equal in ((0, False), (12, True)):
        losses = [
            advance(plain_run, state, step, first, first + 1)[1]["loss"] for step in (plain, mixed)
        ]
        assert (losses[0] == pytest.approx(losses[1], rel=1e-6)) == equal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"accumulate": 7},
            r"batch_size=120 cannot be divided over \d devices?, times --config.accumulate=7; use "
            "119 or 126",
        ),
        (
            {"data__on_device": True, "data__augment": "centre+flip"},
            "on_device=True supports resized_crop, crop, flip and augmentations of the step, not c",
        ),
        (
            {"data__on_device": True, "data__augment": "resized_crop(interpolation=lanczos)"},
            "cannot be cut on the device: .* bilinear or bicubic",
        ),
        ({"data__augment": "erase+crop"}, "in another order than that of its stages"),
        (
            {"data__augment": "rand_augment(m=20)"},
            r"m must be .*, not 20 .*\[--config.data.augment\]",
        ),
        (
            {"loss": "binary", "label_smoothing": 0.1},
            "label_smoothing=0.1 cannot be combined with --config.loss=binary",
        ),
        (
            {"optim__cooldown_epochs": 1.0, "optim__schedule": "constant"},
            "cooldown_epochs=1.0 .*--config.optim.schedule=constant",
        ),
    ],
)
def test_invalid_settings_are_refused_with_advice(changes, message):
    assert_refused(message, **changes)


def test_cooldowns_are_checked_against_the_steps(capsys):
    for steps, fits in ((40, True), (6, False)):
        setup, _ = prepare(tiny(epochs=1.0, steps=steps, optim__cooldown_epochs=2.0))
        assert setup.total_steps == steps
        assert ("of cooldown do not fit" in capsys.readouterr().err) != fits
