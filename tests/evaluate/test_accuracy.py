"""The rows of a run: windows, crops, rules of rotary schemes and protocols; and its pictures."""

import functools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax import evaluate
from rope_jax.commands import evaluate as evaluate_command
from rope_jax.config import ConfigError
from rope_jax.data import decode_image
from rope_jax.data.sources import scenes
from rope_jax.evaluate.accuracy import draw_predictions, state_evaluator
from rope_jax.models import attention as attention_module
from rope_jax.tasks import seeds
from rope_jax.tasks.pictures import Segmented, draw_pictures
from rope_jax.tasks.sheets import class_colours
from rope_jax.training.setup import initial_state, load_split, prepare
from rope_jax.training.signals import Signals
from rope_jax_kernels import attention_qkv
from tests.models.small import fill
from tests.refusals import expect_refusal
from tests.small_run import save_run
from tests.training.recipe import tiny

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
    planned = evaluate.planned_rows(setup)
    assert evaluate.same_rows({"eval": rows}, planned)
    images = load_split(setup.config, "test", (64, 64))
    x = jnp.asarray((images.images / np.float32(255) - 0.5) / 0.5, jnp.float32)
    measured = {"scaled": [], "kept": []} if count > 1 else {"scaled": []}
    for params in seeds.split(state["params"], setup.config.seeds):
        alone = nnx.merge(setup.graph, params, {}, seeds.take(setup.rest, setup.config.seeds))
        large = evaluate.at_resolution(alone, (64, 64), scale_windows=True)
        for windows, accuracies in measured.items():
            run = large if windows == "scaled" else alone
            logits = jax.jit(lambda x, run=run: run(x))(x)
            accuracies.append(float((np.asarray(logits).argmax(-1) == images.labels).mean()))
    assert [row["top1"] for row in rows[count:]] == pytest.approx(measured["scaled"], abs=1e-9)
    assert measured["scaled"] != measured.get("kept")


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
            "needs a model with window attention, and ViT has none",
        ),
        ({"eval__log_scale": True}, r"for rotary positions.*\[--config.eval.log_scale\]"),
        ({"eval__frames": ("middle",)}, r"unknown augmentation 'middle'.*\[--config.eval.frames\]"),
    ],
)
def test_impossible_evaluations_are_refused_before_training(changes, message):
    with pytest.raises(ConfigError, match=message):
        prepare(tiny(**SWIN | changes))


def test_rows_name_unscaled_windows():
    setup, _ = prepare(tiny(**SWIN | {"eval__scale_windows": False}))
    protocols = {row["protocol"] for row in evaluate.planned_rows(setup)}
    assert len(protocols) == 1
    assert "windows of 3 x 3 tokens, maps padded to whole windows" in protocols.pop()


@pytest.mark.parametrize(("names", "number"), [(["ground", "one", "two"], 3), (None, 150)])
def test_pictures_have_a_row_for_each_image(tmp_path, names, number):
    """Panels of 256 pixels, 12 apart, below a line of 22 pixels: image, classes, predicted."""
    image, classes = np.full((4, 4, 3), 7, np.uint8), np.zeros((4, 4), np.uint8)
    classes[0, 0], classes[1] = 255, 1
    wide = Segmented(np.full((4, 8, 3), 9, np.uint8), np.full((4, 8), 2, np.uint8),
                     np.zeros((4, 8), np.uint8))  # fmt: skip
    draw_pictures([Segmented(image, classes, classes.T), wide], names, number, tmp_path / "p.png")
    sheet = decode_image((tmp_path / "p.png").read_bytes())
    assert sheet.shape == (22 + 256 + 22 + 128 + 22 + 12 + 22, 816, 3)  # the last is the legend
    colours = np.zeros((256, 3), np.uint8)  # black without a class
    colours[:number] = class_colours(number)
    panels = [sheet[22 : 22 + 256, 12 + k * 268 :][:, :256][32::64, 32::64] for k in range(3)]
    for panel, expected in zip(panels, (image, colours[classes], colours[classes.T]), strict=True):
        np.testing.assert_array_equal(panel, expected)
    assert (sheet[22 + 256 + 22 + 20, [20, 288]] == [[9] * 3, colours[2]]).all()
    assert (sheet[-22 + 4, [17, 167, 317]] == colours[:3]).all()


def test_weights_are_arguments_of_programs(tmp_path, monkeypatch):
    """Constants would be copied into the program: gigabytes for a large model."""
    monkeypatch.setattr(scenes, "COUNTS", {"train": 8, "test": 2})
    changes = {"data__source": "scenes", "data__image_size": 16, "data__augment": "none"}
    changes |= {"model__head": "linear", "eval__resolutions": (), "batch_size": 8}
    setup, model = prepare(tiny(**changes))
    state = initial_state(setup, model)
    evaluator = state_evaluator(setup, state)
    traced = jax.jit(evaluator.apply).trace(evaluator.weights, np.zeros((2, 16, 16, 3), np.float32))
    sizes = [np.size(x) for x in traced.jaxpr.consts]
    assert max(sizes, default=0) < 16 * 16 * 3
    (first, _) = setup.task.predict(evaluator, setup.held_out, 2)
    assert first.predicted.shape == (16, 16)
    draw_predictions(setup, state, tmp_path / "p.png")
    assert decode_image((tmp_path / "p.png").read_bytes()).shape[1] == 816


SMALL = {"depth": 1, "width": 16, "heads": 1, "image_size": 8, "num_classes": 3}
SIZES = ((8, 8), (12, 16), (4, 8))


def vit(position, **changes):
    return fill(rope_jax.create_model("vit_digits", position=position, **SMALL | changes))


@functools.cache
def images(size):
    return jnp.asarray(np.random.default_rng(0).standard_normal((2, *size, 3)), jnp.float32)


def test_evaluation_and_scheme_options_agree_under_jit():
    model, scheme = vit("rope_mixed"), vit("rope_mixed(extend=yarn,beta=2)")
    for size in SIZES:
        copy = evaluate.at_resolution(model, size, extend="yarn(beta=2)")
        run_twice = jax.jit(lambda x, copy=copy: (model(x), copy(x)))
        plain, extended = run_twice(images(size))
        grid = copy.position.stage.grid
        rotations = [
            rotated_model.position.terms(grid).layer(0).rotation for rotated_model in (copy, scheme)
        ]
        assert jnp.array_equal(*(rotation.freqs for rotation in rotations))
        if size == (8, 8):
            assert jnp.array_equal(plain, extended)
        elif size == (12, 16):
            assert not jnp.allclose(plain, extended, atol=1e-3)
    assert model.position.extension.extend == "none"  # the model itself stays
    assert evaluate.at_resolution(scheme, size, extend="none").position.extension.extend == "none"


def test_kernels_take_the_temperature_as_a_number(monkeypatch):
    attend = unittest.mock.Mock(wraps=attention_qkv)
    monkeypatch.setattr(attention_module, "attention_qkv", attend)
    model = vit("rope2d(log_scale=True)")
    for size in SIZES:
        jax.eval_shape(model, images(size))
    training_scale, *scales = (call.kwargs["scale"] for call in attend.call_args_list)
    assert (training_scale, *map(type, scales)) == (None, float, float)
    plain = SMALL["width"] ** -0.5 / np.log(16)
    assert scales == pytest.approx([plain * np.log(48), plain * np.log(8)])


@pytest.mark.slow
def test_resized_models_remember_the_training_resolution(tmp_path):
    model, large = vit("rope2d(extend=ntk)+ape"), (16, 16)
    model.resize(large)
    rope_jax.save_pretrained(model, tmp_path)
    again = rope_jax.create_model(tmp_path)
    assert (again.notation, again.image_size, again.trained_size) == (model.notation, large, (8, 8))
    rope_part = again.position.parts[0]
    assert (rope_part.trained.grid, rope_part.stage.grid) == ((4, 4), (8, 8))
    logits_pair = [jax.jit(m)(images(large)) for m in (model, again)]
    assert jnp.array_equal(*logits_pair)
    fresh = vit("rope2d(extend=ntk)+ape", image_size=16)
    assert not jnp.array_equal(
        *(p.position.parts[0].terms((8, 8)).rotation.freqs for p in (again, fresh))
    )
    taller = rope_jax.create_model(tmp_path, image_size=(24, 16))
    assert taller.position.parts[0].trained.grid == (4, 4)


def test_the_command_sets_and_names_the_rule(tmp_path, capsys):
    save_run(tmp_path, 1, position="rope2d")
    with expect_refusal(capsys, r"extend must be one of none, .*, yarn, not 'nkt'"):
        evaluate_command.main([str(tmp_path), "--extend=nkt"])
    evaluate_command.main([str(tmp_path), "--resolutions=16", "--extend=ntk", "--log_scale"])
    (row,) = evaluate.read_evaluations(tmp_path / "evaluations.json")
    assert "; rotations with extend=ntk and log_scale; " in row["protocol"]
    assert (row["asked"]["extend"], row["asked"]["log_scale"]) == ("ntk", True)
    assert "rotations with extend=ntk" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("position", "extend", "message"),
    [
        ("ape", "ntk", r"extend=ntk is for rotary positions.* \[--extend\]"),
        ("string", None, r"log_scale is for rotary positions.* \[--log_scale\]"),
        ("rope2d", "yarn(gamma=1)", "yarn has no option 'gamma'; known: log_scale, alpha, beta"),
        ("rope2d", "yarn(alpha=4,beta=2)", "use alpha < beta"),
        ("rope2d", "ntk+yarn", "must be one rule"),
        ("cat_rope(mode=released)", "ntk", "is for rotary positions"),
    ],
)
def test_unsuitable_rules_are_refused(position, extend, message):
    model = rope_jax.create_model("vit_digits", position=position, **SMALL)
    with pytest.raises(ConfigError, match=message):
        evaluate.at_resolution(model, (8, 8), extend=extend, log_scale=extend is None)


def test_models_with_fixed_reach_print_a_note(capsys):
    model = rope_jax.create_model(
        "nat_mini",
        position="rope2d",
        depths=(1,),
        heads=(1,),
        width=8,
        image_size=32,
        num_classes=2,
    )
    evaluate.at_resolution(model, (32, 32), extend="ntk")
    assert capsys.readouterr().err == ""
    evaluate.at_resolution(model, (64, 64), extend="ntk")
    assert "at 64x64 pixels, queries see as many patches as in training" in capsys.readouterr().err


def test_the_cross_axis_transformer_has_no_temperature():
    model = rope_jax.create_model("cat_5", depth=1, width=16, heads=2, image_size=32, num_classes=2)
    ntk = evaluate.at_resolution(model, (64, 64), extend="ntk")
    assert jax.eval_shape(ntk, images((64, 64))).shape == (2, 2)
    with pytest.raises(ValueError, match="cross-axis transformer has none: use extend=ntk"):
        evaluate.at_resolution(model, (64, 64), extend="yarn")(images((64, 64)))
