"""LaPE's equations 1 to 3 and the reach of positions, with golden numbers of a NumPy definition."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import rope_jax
from rope_jax.analysis import joining
from rope_jax.analysis.attention import attention_maps
from rope_jax.analysis.correlation import layer_norm, stage_positions
from rope_jax.models.vit import ViT
from tests.models.small import make_filled_model, pictures, small_model

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "data" / "joining.json").read_text())
SMALL = {"width": 48, "heads": 3, "depth": 2, "image_size": 48}


def draw(case):
    """The arrays of a case, in the order of the golden's draws."""
    rng = np.random.default_rng(case["seed"])
    channels, layers = case["channels"], case["layers"]
    length = case["prefix"] + np.prod(case["grid"])
    shapes = {
        "tokens": ((layers, length, channels), 1),
        "learned": ((length, channels), 0.6),
        "gamma": ((layers, channels), 0.3),
        "beta": ((layers, channels), 0.2),
        "w_q": ((layers, channels, channels), channels**-0.5),
        "w_k": ((layers, channels, channels), channels**-0.5),
        "b_q": ((layers, channels), 0.1),
        "b_k": ((layers, channels), 0.1),
        "lape_gamma": ((layers, channels), 0.5),
        "lape_beta": ((layers, channels), 0.3),
    }
    arrays = {name: scale * rng.standard_normal(shape) for name, (shape, scale) in shapes.items()}
    for name in ("gamma", "lape_gamma"):
        arrays[name] += 1
    if case["embedding"] != "learned":
        i, places = np.arange(channels), np.arange(length)[:, None]
        angles = places / 10000 ** (2 * (i // 2) / channels)
        arrays["learned"] = np.where(i % 2 == 0, np.sin(angles), np.cos(angles))
    if case["zero_prefix"]:
        arrays["learned"][: case["prefix"]] = 0
    return arrays


@pytest.mark.parametrize("name", GOLDEN)
def test_equations_match_the_golden_numbers(name):
    case, expected = GOLDEN[name]["case"], GOLDEN[name]["expected"]
    arrays, epsilon, prefix = draw(case), case["eps"], case["prefix"]
    embedding, heads, rows = arrays["learned"], case["heads"], []
    lape = embedding
    for layer, golden in enumerate(expected["layers"]):
        x = arrays["tokens"][layer]
        norm = (arrays["gamma"][layer], arrays["beta"][layer], epsilon)
        if case["join"] == "lape":
            lape_norm = (arrays["lape_gamma"][layer], arrays["lape_beta"][layer], epsilon)
            lape = positions = layer_norm(lape, *lape_norm)
            tokens = token_part = layer_norm(x, *norm)
            rows.append(positions[prefix:])
        else:
            x = x + embedding
            values = joining.lambdas(x, embedding, epsilon)
            np.testing.assert_allclose(
                values[:, prefix:].mean(-1), golden["lambda_mean_of_patch_tokens"], rtol=1e-10
            )
            positions = values[1][:, None] * layer_norm(embedding, *norm)
            token_part = values[0][:, None] * layer_norm(x - embedding, *norm)
            bias = values[2][:, None] * arrays["beta"][layer]
            tokens = layer_norm(x, *norm) - positions
            np.testing.assert_allclose(tokens, token_part + bias, atol=1e-12)  # equation 2
            rows.append(layer_norm(embedding, *norm)[prefix:])
        size = lambda part: np.mean(part[prefix:] ** 2) ** 0.5
        assert size(token_part) == pytest.approx(golden["rms_of_token_part"], rel=1e-10)
        assert size(positions) == pytest.approx(golden["rms_of_position_part"], rel=1e-10)
        kernel = np.concatenate([arrays["w_q"][layer], arrays["w_k"][layer]], axis=1)
        biases = np.concatenate([arrays["b_q"][layer], arrays["b_k"][layer]])
        scale = (case["channels"] / heads) ** -0.5
        terms = scale * joining.logit_terms(tokens, positions, kernel, biases, heads)
        sizes, fractions = joining.term_sizes(terms)
        np.testing.assert_allclose(sizes.mean(-1), golden["term_rms_mean_of_heads"], rtol=1e-10)
        np.testing.assert_allclose(
            fractions.mean(-1), golden["term_share_mean_of_heads"], rtol=1e-9
        )
    measures = joining.position_measures(np.stack(rows), tuple(case["grid"]))
    for measure in ("reach", "two_dimensional", "raster"):
        numbers = [golden[measure] for golden in expected["layers"]]
        np.testing.assert_allclose(measures[measure], numbers, rtol=1e-10)
    np.testing.assert_allclose(measures["change"][1:], expected["change_between_layers"], rtol=1e-9)
    assert joining.trend(measures["reach"]) == pytest.approx(expected["trend_of_reach"])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("position", ["ape", "lape(ape)"])
def test_models_are_measured_at_the_input_of_each_layer(position):
    model = small_model("deit_ti16", position, dtype=jnp.float64)
    images = jnp.asarray(pictures(6, 10), jnp.float64)
    values = joining.measure_joining(model, images)
    assert all(x.shape == (model.options.depth,) for x in values.values())
    np.testing.assert_allclose(sum(values[name] for name in joining.SHARES), 1, rtol=1e-9)
    x, _ = model.start(images, False, None)
    epsilon = model.options.norm_epsilon
    if position == "ape":
        embedding = np.asarray(model.position.embed(jnp.zeros((1, 16, 48)), (3, 5))[0], np.float64)
        expected = np.mean([joining.lambdas(np.asarray(y), embedding, epsilon) for y in x], 0)
        for name, (first, *others) in zip(joining.LAMBDAS, expected, strict=True):
            assert values[name][0] == pytest.approx(np.mean(others), rel=1e-9)
            assert values[f"{name} of the class token"][0] == pytest.approx(first, rel=1e-9)
    else:
        assert "lambda_1" not in values
        rows = np.asarray(model.position.terms((3, 5)).add.value[:, 1:], np.float64)
        np.testing.assert_allclose(values["positions"], (rows**2).mean((1, 2)) ** 0.5, rtol=1e-6)
        tokens = np.asarray(model.blocks[0].norm1(x))[:, 1:]
        expected = ((tokens**2).mean((1, 2)) ** 0.5).mean()
        assert values["tokens"][0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "position", "options"),
    [
        ("deit_ti16", "ape+rope_mixed", {}),
        ("deit_ti16", "lape(ape)+rope2d(pairing=interleaved,log_scale=True)", {"image_size": 32}),
        ("deit3_ti16", "ape", {"k_bias": False}),
        ("t2t_vit_7", "sincos1d", {"logit_scale": "width"}),
    ],
)
def test_terms_add_up_to_the_logits_of_the_model(name, position, options, monkeypatch):
    recorded, sizes = [], joining.term_sizes
    monkeypatch.setattr(joining, "term_sizes", lambda x: recorded.append(x.sum(0)) or sizes(x))
    model = make_filled_model(name, position, dtype=jnp.float64, **SMALL | options)
    images = jnp.asarray(pictures(48, 48, batch=1), jnp.float64)
    joining.measure_joining(model, images)
    weights = attention_maps(model, images)  # of the class token
    for logits, expected in zip(recorded, weights, strict=True):
        softmax = scipy.special.softmax(logits[:, 0], -1)[:, 1:]
        np.testing.assert_allclose(softmax, expected[0].reshape(softmax.shape), atol=1e-12)


@pytest.mark.parametrize(
    ("name", "position", "options", "words"),
    [
        ("vit_s16", "ape", {"attention": "window"}, "windows or neighbourhoods"),
        ("nat_isotropic_s16", "ape", {}, "windows or neighbourhoods"),
        ("deit_ti16", "ape", {"cosine": True}, "post_norm or cosine"),
        ("deit_ti16", "ape", {"post_norm": True}, "post_norm or cosine"),
        ("cct_7_3x1", "ape", {}, "normalises its tokens between layers"),
        ("cat_5", "ape", {}, "has no softmax"),
        ("deit_ti16", "ape+peg", {}, "adds positions between layers"),
        ("deit_ti16", "ape+liere", {}, "wraps attention"),
        ("deit_ti16", "rope2d", {}, "adds no embedding"),
        ("deit_ti16", "ape+lape(ape)", {}, "once and another one in each layer"),
    ],
)
def test_other_layers_are_refused(name, position, options, words):
    model = make_filled_model(name, position, **SMALL | options)
    with pytest.raises(ValueError, match=words):
        joining.measure_joining(model, pictures(*model.image_size))


def test_batches_of_one_model_are_compiled_once(monkeypatch):
    starts = []
    monkeypatch.setattr(ViT, "start", lambda *x, start=ViT.start: starts.append(x) or start(*x))
    model = small_model("deit_ti16", "ape", width=24)
    joining.measure_joining(model, pictures(6, 10))
    traced = len(starts)
    joining.measure_joining(model, pictures(6, 10) + 1)
    assert len(starts) == traced > 0


def test_equal_values_share_a_rank():
    assert joining.trend([0.5, 0.5, 0.5, 0.4]) == pytest.approx(-0.7745967)
    assert [joining.trend(x) for x in ([0.5] * 4, [0.5])] == [0.0, 0.0]


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 1), (1, 5), (4, 1)])
def test_what_small_maps_do_not_define_is_none(grid):
    rows = np.random.default_rng(0).standard_normal((2, grid[0] * grid[1], 8))
    measures = joining.position_measures(rows, grid)
    assert measures["two_dimensional"] == measures["raster"] == [None, None]
    for name, values in (("reach", measures["reach"]), ("change", measures["change"][1:])):
        assert all((x is None) == (rows.shape[1] < 3) for x in values), name


def test_stages_have_their_own_maps():
    options = {"width": 16, "depths": (1, 2), "heads": (1, 2), "window_size": 2}
    model = rope_jax.create_model("swin_t", position="lape(ape)", image_size=32, **options)
    stages = stage_positions(model, (32, 32))
    assert [(grid, rows.shape) for grid, rows in stages] == [
        ((8, 8), (1, 64, 16)),
        ((4, 4), (2, 16, 32)),
    ]
    with pytest.raises(ValueError, match="isotropic"):
        joining.measure_joining(model, pictures(32, 32))
