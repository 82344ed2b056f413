"""The cross-axis transformer: rotations, definition, weights, costs and initialisation."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.cat import cross_axis
from rope_jax.weights import export_state_dict
from rope_jax_kernels import Rotation, rotate
from tests.models.definition import convolve, norm, value
from tests.models.small import abstract, make_filled_model, pictures, run
from tests.parity import official

SMALL = {"width": 24, "heads": 3, "depth": 2, "patch_size": 2, "image_size": 8}
RELEASED = {"operator": "released", "imprint": "decayed"}


small = functools.partial(make_filled_model, "cat_5", **SMALL)


# The operator


def attend(q, k, v, options):
    """The output by the formulas; q, k, v are [H, W, D]."""
    scores = np.einsum("hwd,hod->hwo", q, k)
    if options.between == "retnet":
        scores = scores / np.maximum(abs(scores.sum(axis=-1, keepdims=True)), 1)
    # Of the row with the number of the query's column, or of all rows.
    return np.einsum("hwo,wod->hwd" if options.operator == "paper" else "hwo,rod->hwd", scores, v)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("operator", ["paper", "released"])
def test_rotations_turn_queries_and_keys(operator):
    rng = np.random.default_rng(0)
    rotation = Rotation(jnp.asarray(rng.standard_normal((9, 2))), jnp.eye(2)[None])
    q, k, v = jnp.asarray(rng.standard_normal((3, 1, 9, 1, 4)))
    run = functools.partial(cross_axis, grid=(3, 3), operator=operator)
    want = run(*rotate(q, k, rotation), v)
    np.testing.assert_allclose(run(q, k, v, rotation=rotation), want, rtol=0, atol=1e-12)


# The model


def reference(model, image, reads):
    """Logits of one image without position, by the definition."""
    options = model.options
    x = convolve(image, model.patch_embed.proj, 2)
    height, width, _ = x.shape
    imprint = x.copy()
    if options.imprint_token:
        imprint[{"first": (0, 0), "last": (-1, -1)}[reads]] = value(model.imprint_token)[0, 0]
    for index, block in enumerate(model.blocks):
        decay = 1 - math.tanh(math.pi * index / options.depth)
        at = index / options.depth
        shares = {"none": 0, "paper": 1, "decayed": 0, "tanh": decay, "backwards_tanh": 1 - decay}
        shares |= {"linear": 1 - at, "backwards_linear": at}
        late = decay if options.imprint == "decayed" else 0
        share = shares[options.imprint] if index in (options.imprint_layers or (0, 1)) else 0
        tokens = norm(x, block.norm1, 1e-5) + share * imprint
        qkv = np.split(tokens @ value(block.attn.qkv.kernel), 3, axis=-1)
        q, k, v = (part + late * imprint for part in qkv)
        if options.focal_mask:
            point = np.tanh(tokens.mean(axis=(0, 1)) @ value(block.attn.focus.kernel))
            ys, xs = ((2 * np.arange(n) + 1 - n) / max(height, width) for n in (height, width))
            k = k * np.exp(-np.hypot(ys[:, None] - point[0], xs - point[1]))[..., None]
        heads = []
        for head, channels in enumerate(np.split(np.arange(options.width), options.heads)):
            keys = k[..., channels] * (1 - 2.0 ** (-5 - head))
            out = attend(q[..., channels], keys, v[..., channels], options)
            out = (out - out.mean()) / np.sqrt(out.var() + 1e-5)
            scale, bias = (value(x)[head] for x in (block.attn.norm.scale, block.attn.norm.bias))
            heads.append(out * scale + bias)
        x = x + np.concatenate(heads, axis=-1) @ value(block.attn.proj.kernel)
        hidden = norm(x, block.norm2, 1e-5) @ value(block.mlp.fc1.kernel)
        x = x + hidden / (1 + np.exp(-hidden)) @ value(block.mlp.fc2.kernel)
    x = norm(x, model.norm, 1e-5)
    pooled = {"first": x[0, 0], "last": x[-1, -1], "mean": x.mean(axis=(0, 1))}[reads]
    return pooled @ value(model.head.kernel) + value(model.head.bias)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("options", "size", "reads"),
    [
        ({}, (6, 6), "mean"),
        ({"imprint": "none", "pool": "first"}, (6, 6), "first"),
        ({"imprint_token": True}, (6, 6), "first"),
        ({"imprint": "backwards_tanh", "focal_mask": True}, (6, 6), "mean"),
        ({"imprint": "linear", "between": "retnet"}, (6, 6), "mean"),
        ({"imprint": "backwards_linear", "imprint_layers": (1,)}, (6, 6), "mean"),
        (RELEASED, (6, 10), "last"),
        (RELEASED | {"imprint_token": True, "mlp_ratio": 2.0}, (6, 10), "last"),
        (RELEASED | {"imprint": "tanh", "focal_mask": True, "pool": "mean"}, (10, 6), "mean"),
    ],
    ids=str,
)
def test_the_model_matches_its_definition(options, size, reads):
    model = small("none", image_size=size, dtype=jnp.float64, **options)
    images = pictures(*size).astype(jnp.float64)
    want = [reference(model, image, reads) for image in np.asarray(images)]
    np.testing.assert_allclose(run(model, images)[0], want, rtol=0, atol=1e-11)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_float64_logits_match_the_released_code_at_both_corners():
    name = "cat_released_224"
    case, golden = official.CASES[name], official.golden(name)
    make = lambda pool: rope_jax.create_model(
        "cat_5", position=case["position"], dtype=jnp.float64, **case["options"] | {"pool": pool}
    )
    model, other = (nnx.eval_shape(functools.partial(make, pool)) for pool in ("last", "first"))
    rope_jax.convert_state_dict(model, official.state_dict(name), source="cat")
    graph, state = nnx.split(model)
    encode = jax.jit(lambda state, images: nnx.merge(graph, state).encode(images))
    tokens = encode(state, jnp.asarray(official.images(224, 224), jnp.float64))
    assert np.abs(model.head(model.pool(tokens)) - golden["logits_f64"]).max() < 1e-9
    # This one is recorded in float32 only.
    assert np.abs(model.head(other.pool(tokens)) - golden["logits_top_left"]).max() < 2e-5


def test_weights_round_trip():
    model = small("cat_rope(mode=released)", **RELEASED)
    position = "cat_rope(mode=released)"
    other = abstract("cat_5", position=position, num_classes=5, **SMALL | RELEASED)
    rope_jax.convert_state_dict(other, export_state_dict(model, source="cat"), source="cat")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(other))


@pytest.mark.slow
def test_pairings_convert_without_an_imprint_on_q_and_k():
    position, images = "cat_rope(mode=released,pairing={})", pictures(8, 8)
    half, interleaved = (
        small(position.format(pairing), operator="released") for pairing in ("half", "interleaved")
    )
    want = run(half, images)[0]
    assert np.abs(want - run(interleaved, images)[0]).max() > 0.01
    rope_jax.convert_state_dict(interleaved, export_state_dict(half, source="cat"), source="cat")
    np.testing.assert_allclose(run(interleaved, images)[0], want, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"pairing=interleaved.*pairing=half"):
        export_state_dict(small(position.format("interleaved"), **RELEASED), source="cat")


# What it costs


@pytest.mark.parametrize("operator", ["paper", "released"])
def test_attention_cost_grows_with_tokens_to_the_power_of_one_and_a_half(operator):
    def flops(side):
        x = jax.ShapeDtypeStruct((1, side**2, 1, 64), jnp.float32)
        run = jax.jit(functools.partial(cross_axis, grid=(side, side), operator=operator))
        return run.lower(x, x, x).compile().cost_analysis()["flops"]

    assert flops(16) / flops(8) == pytest.approx(
        4**1.5, rel=0.02
    )  # sums over rows of the values add to the products
