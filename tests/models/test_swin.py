"""Swin, and common properties of hierarchical backbones: definition, sizes, features, positions.

Tolerance of the definition: float64 and logits of size 1 leave 1e-13 of rounding.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.attention import CosineAttention
from rope_jax.models.layers import layer_dtypes
from rope_jax_kernels import Window, window_bias
from tests.kernels.attention_pairs import mask
from tests.models.definition import attend, convolve, dense, norm, places, run_block, value
from tests.models.small import (
    abstract,
    compile_read,
    make_filled_model,
    pictures,
    run,
)
from tests.slow import some_slow

TINY = {"width": 16, "depths": (2, 2), "heads": (2, 4), "mlp_ratio": 2.0}
SIZE = (36, 52)  # maps of 9 x 13 and 5 x 7 tokens


tiny = functools.partial(make_filled_model, image_size=SIZE, **TINY)


# The definition. Each family defines which pairs of tokens meet in a block, and where the table
# has the offset of a pair.


def patches(embed, image):
    return norm(convolve(image, embed.proj, 4), embed.norm, 1e-5)


def merge_patches(x, layer):
    x = np.pad(x, ((0, x.shape[0] % 2), (0, x.shape[1] % 2), (0, 0)))
    x = np.concatenate([x[0::2, 0::2], x[1::2, 0::2], x[0::2, 1::2], x[1::2, 1::2]], axis=2)
    kernel = value(layer.reduction.kernel)
    return (
        norm(x @ kernel, layer.norm, 1e-5)
        if layer.post_norm
        else norm(x, layer.norm, 1e-5) @ kernel
    )


def attend_on(grid, x, block, heads, where, allowed, terms):
    bias, theta = terms(*where, grid)
    return attend(x, block.attn, heads, allowed=allowed(*where, grid), bias=bias, theta=theta)


def stage_maps(
    model, image, allowed, terms, stem=patches, downsample=merge_patches, attend=attend_on
):
    """Maps of all stages, the last one normalised.

    terms(stage, block, grid) gives bias(head) and theta(head), or None for either.
    """
    x, maps = stem(model.patch_embed, image), []
    for index, stage in enumerate(model.stages):
        grid = x.shape[:2]
        x = x.reshape(-1, x.shape[2])
        for number, block in enumerate(stage.blocks):
            heads, where = model.options.heads[index], (index, number)
            arguments = (block, heads, where, allowed, terms)
            attention = lambda x, grid=grid, arguments=arguments: attend(grid, x, *arguments)
            x = run_block(x, block, attention, model.options)
        x = x.reshape(*grid, -1)
        maps.append(x)
        x = x if stage.downsample is None else downsample(x, stage.downsample)
    return [*maps[:-1], norm(x, model.norm, 1e-5)]


def fit_windows(size, grid):
    """Side and shift of the windows of a map along each axis.

    As in microsoft/Swin-Transformer, where `min(input_resolution) <= window_size` makes the short
    side the window and the shift 0, and windows must divide the map; otherwise each axis by itself.
    """
    short = min(grid)
    if short <= size and max(grid) % short == 0:
        return [(short, 0), (short, 0)]
    return [(n, 0) if n <= size else (size, size // 2) for n in grid]


def windows(size):
    """Pairs of tokens in one window of side `size`; in odd blocks of one that is shifted."""

    def make_mask(stage, block, grid):
        sides, shifts = zip(*fit_windows(size, grid), strict=True)
        return mask(Window(sides, shifts if block % 2 else (0, 0)), grid)

    return make_mask


def offsets(model, stage, block, grid, *, sign, step=1):
    """The bias of a block: query minus key (sign 1) or key minus query (-1).

    Pairs that never meet may have any value.
    """
    table = np.asarray(model.stages[stage].position.offsets[...])[block]
    apart = places(grid)[:, None] - places(grid)[None]
    centre = np.array(table.shape[1:]) // 2
    index = np.clip(sign * apart // step + centre, 0, np.array(table.shape[1:]) - 1)
    return lambda head: table[head][index[..., 0], index[..., 1]]


def mixed_angles(model, stage, block, grid):
    freqs = np.asarray(model.stages[stage].position.mixed[...])[block]
    return lambda head: places(grid) @ freqs[head]


def axial(heads):
    """Heads of 8 channels: one pair for each axis."""

    def theta(grid, head):
        centres = [(2 * places(grid)[:, axis] + 1 - n) / max(grid) for axis, n in enumerate(grid)]
        return np.stack(centres, axis=1) * math.pi * 10 ** (head / heads)

    return theta


def make_terms(model, position, dilations=None):
    """Bias and angles of a scheme as `stage_maps` takes them; with dilations, of NAT."""

    def terms(stage, block, grid):
        step = dilations[stage] if dilations and block % 2 else 1
        bias = theta = None
        if position == "rpb":
            sign = -1 if dilations else 1
            bias = offsets(model, stage, block, grid, sign=sign, step=step)
        elif position == "cpb":
            bias = network_bias(model, stage, block, grid)
        elif position == "rope_mixed":
            theta = mixed_angles(model, stage, block, grid)
        elif position == "axial_rope":
            theta = functools.partial(axial(2 << stage), grid)
        return bias, theta

    return terms


def assert_is_its_definition(model, allowed, terms, *, size=SIZE, **parts):
    images = pictures(*size).astype(jnp.float64)
    assert model.options.norm_epsilon == 1e-5
    maps = compile_read(model, lambda model, images, _: model.features(images))(images)
    wants = [stage_maps(model, image, allowed, terms, **parts) for image in np.asarray(images)]
    for got, *want in zip(maps, *wants, strict=True):
        assert np.std(want) > 0.1
        np.testing.assert_allclose(got, np.array(want), rtol=0, atol=1e-10)
    logits = [dense(want[-1].mean(axis=(0, 1)), model.head) for want in wants]
    np.testing.assert_allclose(run(model, images)[0], logits, rtol=0, atol=1e-10)


# Windows that do not divide maps, and maps of the official code: of 8 x 16 and 4 x 8, of 4 x 8 and
# 2 x 4, and of 8 x 8 and 4 x 4 tokens.
CASES = [("rpb", SIZE, 4), ("rpb", SIZE, 5), ("rpb", SIZE, 7), ("rope_mixed", SIZE, 4)]
CASES += [("axial_rope", SIZE, 3), ("rpb", (32, 64), 4), ("rpb", (64, 32), 4)]
CASES += [("rpb", (16, 32), 8), ("rpb", (32, 32), 7)]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("position", "size", "window"),
    some_slow(CASES, [("rpb", SIZE, 5), ("rpb", (16, 32), 8)]),
)
def test_swin_matches_its_definition(position, size, window):
    model = tiny("swin_t", position, image_size=size, dtype=jnp.float64, window_size=window)
    assert_is_its_definition(model, windows(window), make_terms(model, position), size=size)


# Swin V2


def network_bias(model, stage, block, grid, border=None):
    """The bias of a network of the offset; it is 1 at the border of the window of creation."""
    position = model.stages[stage].position
    kernel1, bias1, kernel2 = (
        value(x)[block] for x in (position.kernel1, position.bias1, position.kernel2)
    )
    border = border or [side - 1 for side, _ in fit_windows(model.options.window_size, grid)]
    apart = 8 * (places(grid)[:, None] - places(grid)) / border
    hidden = (np.sign(apart) * np.log2(1 + abs(apart)) / 3) @ kernel1 + bias1
    table = 16 / (1 + np.exp(-np.maximum(hidden, 0) @ kernel2))
    return lambda head: table[..., head]


V2 = {"post_norm": True, "cosine": True, "k_bias": False}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "position"),
    some_slow(
        [("swinv2_t", "cpb"), ("swinv2_t", "rope_mixed"), ("swin_t", "rpb")], [("swinv2_t", "cpb")]
    ),
)
def test_swin_v2_matches_its_definition(name, position):
    options = V2 if name == "swin_t" else {}
    model = tiny(name, position, dtype=jnp.float64, window_size=4, **options)
    for stage in model.stages:
        scales = stage.blocks[0].attn.logit_scale
        scales.set_value(scales[...].at[0].set(3).at[-1].set(5))  # beyond ln 100
    assert_is_its_definition(model, windows(4), make_terms(model, position))


def test_the_clamp_of_cosine_attention_passes_no_gradient():
    """Nor do tokens of zeros, such as padding, give one that is not finite."""
    settings = {"rngs": nnx.Rngs(0), "dtypes": layer_dtypes(jnp.dtype("float32"))}
    attention = CosineAttention(8, 2, **settings)
    attention.logit_scale.set_value(jnp.array([4.0, 5.0]))
    graph, params = nnx.split(attention)
    qkv = (
        jnp.zeros((1, 3, 3, 2, 4)).at[:, 1:].set(pictures(2, 4)[:1].reshape(1, 2, 1, 2, 6)[..., :4])
    )
    run = lambda params, qkv: nnx.merge(graph, params).prepare(qkv)

    @jax.jit
    def gradients(params, qkv):
        made, pull = jax.vjp(run, params, qkv)
        return pull(made)

    of_params, of_qkv = gradients(params, qkv)
    np.testing.assert_array_equal(of_params["logit_scale"][...] > 1, [True, False])
    assert of_params["logit_scale"][1] == 0
    assert np.isfinite(of_qkv).all()


def test_larger_windows_extend_those_of_training(tmp_path):
    assert abstract("swinv2_t").window == (8, 8)
    rope_jax.save_pretrained(tiny("swinv2_t", image_size=64, window_size=4), tmp_path)
    larger = rope_jax.create_model(tmp_path, image_size=96)
    assert [stage.position.border for stage in larger.stages] == [(3, 3), (3, 3)]
    larger = rope_jax.create_model(tmp_path, image_size=96, window_size=6)
    rope_jax.save_pretrained(larger, tmp_path / "larger")
    for model in (larger, rope_jax.create_model(tmp_path / "larger")):
        assert model.window == (6, 6)
        assert [stage.position.border for stage in model.stages] == [(3, 3), (3, 3)]
    bias, grid = network_bias(larger, 0, 1, (6, 6), border=[3, 3]), (24, 24)
    table = larger.stages[0].position.terms(grid).layer(1).bias
    np.testing.assert_allclose(window_bias(table, 6)[1], bias(1), rtol=1e-5)
    with pytest.raises(ValueError, match=r"\(121, 2\); for size=\(6, 6\) it must be \[N, 121\]"):
        window_bias(table.T, 6)


# Sizes


@pytest.mark.parametrize("position", some_slow(["rpb+ape", "lape(ape)+axial_rope"], ["rpb+ape"]))
def test_calling_on_another_size_equals_resizing(position):
    model, images = tiny("swin_t", position, window_size=4), pictures(20, 76)
    before = run(model, images)[0]
    model.resize((20, 76))
    np.testing.assert_allclose(run(model, images)[0], before, rtol=0, atol=1e-5)


def test_relative_windows_and_tables_grow_with_the_image():
    model = tiny("swin_t", "rpb", image_size=96, window_size=None)
    assert model.window == (3, 3)
    assert [stage.position.offsets.shape[2:] for stage in model.stages] == [(5, 5)] * 2
    model.resize((64, 160))
    assert model.patterns(1, (2, 20)) == [Window((2, 5)), Window((2, 5), (0, 2))]
    assert [stage.position.offsets.shape[2:] for stage in model.stages] == [(3, 9)] * 2
    assert run(model, pictures(64, 160))[0].shape == (2, 5)
    with pytest.raises(ValueError, match=r"window_size=None .* 224x100"):
        model.resize((224, 100))


@pytest.mark.parametrize(
    ("grid", "size", "shift"),
    [
        ((9, 13), (4, 4), (2, 2)),
        (
            (4, 12),
            (4, 4),
            (0, 0),
        ),  # squares of the short side fill the map: as in the official code, none is shifted
        ((9, 3), (3, 3), (0, 0)),
        ((2, 4), (2, 2), (0, 0)),
        ((3, 3), (3, 3), (0, 0)),
        ((4, 13), (4, 4), (0, 2)),  # they do not: each axis by itself
        ((13, 3), (4, 3), (2, 0)),
        ((3, 4), (3, 4), (0, 0)),
    ],
)
def test_windows_fit_short_maps(grid, size, shift):
    model = tiny("swin_t", "rpb+rope2d", window_size=4, image_size=(4 * grid[0], 4 * grid[1]))
    assert model.patterns(0, grid) == [Window(size), Window(size, shift)]
    assert model.stages[0].position.parts[0].offsets.shape[2:] == tuple(2 * n - 1 for n in size)
    assert model.stages[0].position.terms(grid).rotation.coords.shape == (size[0] * size[1], 2)


# Positions


@pytest.mark.parametrize("name", ["swin_t", "nat_mini"])
def test_absolute_embeddings_act_on_the_first_stage_only(name):
    leaves = lambda model: jax.tree.leaves(nnx.state(model, nnx.Param))
    count = lambda position: sum(x.size for x in leaves(tiny(name, position)))
    assert count("ape+rpb") - count("rpb") == 9 * 13 * 16
    assert count("ape") - count("none") == 9 * 13 * 16
    assert count("lape(ape)") - count("none") == sum(
        (h * w + 2 * 2) * 16 * 2**stage for stage, (h, w) in enumerate([(9, 13), (5, 7)])
    )
