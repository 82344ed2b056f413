"""Models beyond the training resolution: rules of rotary schemes, set there or in evaluation."""

import functools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rope_jax
from rope_jax import evaluate
from rope_jax.commands import evaluate as evaluate_command
from rope_jax.config import ConfigError
from rope_jax.models import attention as attention_module
from rope_jax_kernels import attention_qkv
from tests.models.small import fill
from tests.refusals import expect_refusal
from tests.small_run import save_run

SMALL = {"depth": 1, "width": 16, "heads": 1, "image_size": 8, "num_classes": 3}
SIZES = ((8, 8), (12, 16), (4, 8))


def vit(position, **changes):
    return fill(rope_jax.create_model("vit_digits", position=position, **SMALL | changes))


@functools.cache
def images(size):
    return jnp.asarray(np.random.default_rng(0).standard_normal((2, *size, 3)), jnp.float32)


def test_evaluation_and_scheme_options_agree_under_jit():
    model, scheme = vit("rope_mixed"), vit("rope_mixed(extend=yarn,beta=2)")
    for size in SIZES[:2]:
        copy = evaluate.at_resolution(model, size, extend="yarn(beta=2)")
        run_all = jax.jit(lambda x, copy=copy: (model(x), copy(x), scheme(x)))
        plain, extended, other = run_all(images(size))
        assert jnp.array_equal(extended, other)
        if size == (8, 8):
            assert jnp.array_equal(plain, extended)
        else:
            assert np.abs(plain - extended).max() > 1e-3
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


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ("ape(extend=ntk)", "ape has no option 'extend'"),
        (
            "rope2d(extend=ntkk)",
            "rope2d: extend must be one of none, extrapolate,",
        ),
        ("cat_rope(mode=released,extend=ntk)", "extend are for rotations by coordinates times"),
        ("rope2d(log_scale=1.5)", "log_scale must be True or False"),
    ],
)
def test_unsuitable_scheme_options_are_refused(position, message):
    with pytest.raises(ValueError, match=message):
        rope_jax.create_model("vit_digits", position=position, **SMALL)


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
