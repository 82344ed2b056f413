"""The rows of a run: their windows, crops and protocols."""

import pytest
from flax import nnx

from rope_jax import evaluate
from rope_jax.tasks import seeds
from rope_jax.training.setup import initial_state, prepare
from rope_jax.training.signals import Signals
from tests.models.small import fill
from tests.training.recipe import accuracy, assert_refused, tiny

SWIN = {
    "model__name": "swin_t",
    "model__options": "width=8,depths=(1,),heads=(1,),window_size=3",
    "model__position": "rpb",
    "data__image_size": 32,
    "data__augment": "none",
    "data__on_device": True,
    "eval__resolutions": (64,),
    "eval__batch_size": 360,
    "eval__scale_windows": True,
}


# Windows that follow the image size in training do so in evaluation, scaled or not.
UNSCALED = {
    "model__options": SWIN["model__options"].replace("=3", "=None"),
    "eval__scale_windows": False,
}


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (1, {}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(2, UNSCALED, marks=pytest.mark.slow),
    ],
)
def test_windows_of_a_run_scale_with_the_image(count, changes):
    setup, model = prepare(tiny(seeds=count, **SWIN | changes))
    state = initial_state(setup, fill(model))
    rows = evaluate.evaluate_state(setup, state, signals=Signals())
    assert [row["resolution"] for row in rows] == [[32, 32]] * count + [[64, 64]] * count
    assert all("; windows of 1/32 of the image; " in row["protocol"] for row in rows)
    assert evaluate.same_rows({"eval": rows}, evaluate.planned_rows(setup))
    scaled, kept = [], []
    for params in seeds.split(state["params"], count):
        alone = nnx.merge(setup.graph, params, {}, seeds.take(setup.rest, count))
        large = evaluate.at_resolution(alone, (64, 64), scale_windows=True)
        scaled.append(accuracy(large, setup.config, (64, 64)))
        if count > 1:
            kept.append(accuracy(alone, setup.config, (64, 64)))
    assert [row["top1"] for row in rows[count:]] == pytest.approx(scaled, abs=1e-9)
    if count > 1:
        assert scaled != kept


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval__resolutions": (48,)}, r"does not allow: .* \[--config.eval.scale_windows\]"),
        pytest.param(
            UNSCALED | {"eval__resolutions": (48,)},
            r"does not allow: .* \[--config.eval.resolutions\]",
            marks=pytest.mark.slow,
        ),
        (
            {"model__name": "vit_digits", "model__options": ""},
            "needs a model whose windows can follow the image, .* unlike ViT",
        ),
        ({"eval__log_scale": True}, r"for rotary positions.*\[--config.eval.log_scale\]"),
        ({"eval__frame": "middle"}, r"unknown augmentation 'middle'.*\[--config.eval.frame\]"),
        ({"eval__frames": ("middle",)}, r"unknown augmentation 'middle'.*\[--config.eval.frames\]"),
    ],
)
def test_impossible_evaluations_are_refused_before_training(changes, message):
    assert_refused(message, **SWIN | changes)


def test_rows_name_unscaled_windows():
    setup, _ = prepare(tiny(**SWIN | {"eval__scale_windows": False}))
    (protocol,) = {row["protocol"] for row in evaluate.planned_rows(setup)}
    assert "windows of 3 x 3 tokens, maps padded to whole windows" in protocol
