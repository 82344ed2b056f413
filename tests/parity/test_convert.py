"""The converter: names, layouts, pairings, signs and sizes, on small models."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.layers import STORED
from rope_jax.weights import export_state_dict, load_pretrained
from rope_jax.weights.files import WeightsFile
from tests.models.definition import sinusoids
from tests.models.small import make_filled_model, run
from tests.slow import some_slow

VIT = {"width": 48, "heads": 3, "depth": 2}
STAGES = {"width": 16, "depths": (1, 2), "heads": (1, 2)}
CASES = [
    ("deit_ti16", "ape", "deit"),
    ("deit_ti16", "ape", "timm"),
    ("deit_ti16_distilled", "ape", "deit"),
    ("deit_ti16_distilled", "ape", "timm"),
    ("deit_ti16", "lape(ape)", "lape"),
    ("deit_ti16", "lape(sincos1d)", "lape"),
    ("deit3_s16", "ape", "deit"),
    ("deit3_s16", "ape", "timm"),
    ("deit3_s16", "rope2d", "naver"),
    ("deit3_s16", "rope_mixed+ape", "naver"),
    ("deit3_s16", "ape+rope_mixed(pairing=interleaved)", "timm"),
    ("deit3_s16", "rope2d(k_rope=2)", "timm"),
    ("vit_s16", "rpb", "nat"),
    ("vit_s16", "axial_rope", "nat"),
    ("nat_isotropic_s16", "rpb+rope2d(pairing=interleaved)", "nat"),
    ("swin_t", "rpb+ape", "swin"),
    ("swin_t", "rpb", "timm"),
    ("swin_t", "rope_mixed+rpb", "naver"),
    ("swin_t", "rope2d(base=50)", "naver"),
    ("swinv2_t", "cpb(hidden=8)", "swin"),
    ("swinv2_t", "cpb(hidden=8)", "timm"),
    ("swinv2_t", "cpb(hidden=8)+rope2d", "timm"),
    ("nat_small", "rpb", "nat"),
    ("nat_s_tiny", "rpb", "nat"),
    ("dinat_s_tiny", "rpb", "swin"),
    ("deit_ti16", "ape", "augreg"),
    ("nat_small", "rpb", "transformers"),
    ("deit_ti16_distilled", "ape", "transformers"),
]


def small(name, position, *, seed=0, **options):
    """A model with random parameters."""
    sizes = {"num_classes": 5, "image_size": 64} | VIT
    if name.startswith(("swin", "dinat", "nat_")) and name != "nat_isotropic_s16":
        del sizes["depth"]
        sizes |= STAGES | ({"dilations": (2, 1)} if "nat" in name else {})
    make = lambda: rope_jax.create_model(name, position=position, **sizes | options)
    model, rng = nnx.eval_shape(make), np.random.default_rng(seed)
    for _, variable in nnx.to_flat_state(nnx.state(model, STORED)):
        values = 0.3 * rng.standard_normal(variable.shape)
        variable.set_value(jax.device_put(values.astype(variable.dtype)))
    return model


def as_file(arrays, source=None):
    """Weights by name as an open file."""
    shapes = {key: (array.shape, array.dtype) for key, array in arrays.items()}
    return WeightsFile(shapes, arrays.__getitem__, source)


def all_weights(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def assert_same(first, second):
    jax.tree.map(np.testing.assert_array_equal, all_weights(first), all_weights(second))


def assert_near(first, second):
    """Compares tables that were resized layer by layer, and all at once."""
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    jax.tree.map(close, first, second)


def logits(model, height=64, width=64):
    images = np.random.default_rng(0).standard_normal((1, height, width, 3))
    return np.asarray(run(model, jnp.asarray(images, jnp.float32))[0])


# One case for each source and each kind of table; the others are slow.
QUICK = [
    ("deit_ti16_distilled", "ape", "deit"),
    ("deit_ti16", "lape(ape)", "lape"),
    ("deit3_s16", "rope_mixed+ape", "naver"),
    ("deit3_s16", "ape+rope_mixed(pairing=interleaved)", "timm"),
    ("nat_isotropic_s16", "rpb+rope2d(pairing=interleaved)", "nat"),
    ("swin_t", "rpb+ape", "swin"),
    ("swinv2_t", "cpb(hidden=8)+rope2d", "timm"),
    ("nat_small", "rpb", "nat"),
    ("nat_small", "rpb", "transformers"),
    ("deit_ti16", "ape", "augreg"),
]


@pytest.mark.parametrize(("name", "position", "source"), some_slow(CASES, QUICK))
def test_weights_round_trip(name, position, source, tmp_path):
    model = small(name, position)
    state_dict = export_state_dict(model, source=source)
    count = sum(leaf.size for leaf in jax.tree.leaves(all_weights(model)))
    assert sum(array.size for array in state_dict.values()) == count
    np.savez(tmp_path / "model.npz", **state_dict)
    rope_jax.save_pretrained(model, tmp_path / "model.safetensors", source=source)
    for load, weights in (
        (rope_jax.convert_state_dict, state_dict),
        (load_pretrained, tmp_path / "model.npz"),
        (load_pretrained, tmp_path / "model.safetensors"),
    ):
        other = small(name, position, seed=1)
        load(other, weights, source=source)
        assert_same(model, other)


@pytest.mark.parametrize(
    ("position", "k_rope", "source"),
    some_slow(
        [*itertools.product(["rope2d", "rope_mixed"], [1, 2], ["naver", "timm"])],
        [("rope_mixed", 2, "timm")],
    ),
)
def test_channels_are_permuted_to_the_models_pairing(position, k_rope, source):
    model = small("deit3_s16", f"{position}(k_rope={k_rope},pairing=interleaved)")
    other = small("deit3_s16", f"{position}(k_rope={k_rope})", seed=1)
    rope_jax.convert_state_dict(other, export_state_dict(model, source=source), source=source)
    np.testing.assert_allclose(logits(other), logits(model), rtol=0, atol=1e-5)
    nnx.update(other, nnx.state(model, nnx.Param))
    assert np.abs(logits(other) - logits(model)).max() > 1e-3


def test_projections_of_flax_have_an_axis_for_heads(capsys):
    model, block = small("deit_ti16", "ape"), "Transformer/encoderblock_1/MultiHeadDotProduct"
    flax, torch = (export_state_dict(model, source=source) for source in ("augreg", "deit"))
    weights = torch["blocks.1.attn.qkv.weight"].reshape(3, 3, 16, 48)
    for name, weight in zip(("query", "key", "value"), weights, strict=True):
        kernel = flax[f"{block}Attention_1/{name}/kernel"]
        np.testing.assert_array_equal(kernel, weight.transpose(2, 0, 1))
    out = torch["blocks.1.attn.proj.weight"].reshape(48, 3, 16).transpose(1, 2, 0)
    np.testing.assert_array_equal(flax[f"{block}Attention_1/out/kernel"], out)
    # Files for ImageNet-21k have one more layer before their head.
    flax |= {"pre_logits/kernel": np.zeros((48, 48)), "pre_logits/bias": np.zeros(48)}
    with pytest.raises(ValueError, match=r"pre_logits/kernel of .* is not expected"):
        rope_jax.convert_state_dict(small("deit_ti16", "ape", seed=1), flax, source="augreg")
    rope_jax.convert_state_dict(
        small("deit_ti16", "ape", num_classes=7), flax, source="augreg", new_head=True
    )
    assert capsys.readouterr().out == "head: new, 7 classes\n"


@pytest.mark.usefixtures("unchecked_annotations")
def test_a_path_is_no_state_dict():
    with pytest.raises(TypeError, match=r"state_dict is a str; .* for a file use create_model"):
        rope_jax.convert_state_dict(small("deit_ti16", "ape"), "weights.pth", source="timm")


def test_offsets_change_sign_between_windows_and_neighbourhoods():
    swin, nat = small("swin_t", "rpb"), small("nat_s_tiny", "rpb", seed=1)
    rope_jax.convert_state_dict(nat, export_state_dict(swin, source="swin"), source="swin")
    for swin_stage, nat_stage in zip(swin.stages, nat.stages, strict=True):
        np.testing.assert_array_equal(
            nat_stage.position.offsets[...], swin_stage.position.offsets[...][:, :, ::-1, ::-1]
        )


OFFSETS = "layers.1.blocks.0.attn.relative_position_bias_table"


@pytest.mark.parametrize(
    ("name", "position", "source", "key", "before", "after", "window"),
    [
        ("deit_ti16", "ape", "deit", "pos_embed", 64, (96, 80), {}),
        ("deit_ti16", "lape(ape)", "lape", "pos_embed", 64, (96, 80), {}),
        ("deit3_s16", "ape", "deit", "pos_embed", 64, (96, 80), {}),
        ("vit_s16", "rpb", "nat", "layers.0.attn.rpb", 64, (96, 80), {}),
        ("swin_t", "ape", "swin", "absolute_pos_embed", 64, (96, 80), {}),
        # For maps that square windows fill, and for others.
        ("swin_t", "rpb", "swin", OFFSETS, 256, (32, 64), {"window_size": 8}),
        ("swin_t", "rpb", "swin", OFFSETS, 256, (20, 28), {"window_size": 8}),
    ],
)
def test_tables_of_another_map_are_resized_by_the_schemes_rule(
    name, position, source, key, before, after, window
):
    trained = small(name, position, image_size=before, **window)
    model = small(name, position, image_size=after, seed=1, **window)
    state_dict = export_state_dict(trained, source=source)
    rope_jax.convert_state_dict(model, state_dict, source=source)
    trained.resize(after)
    assert_near(all_weights(model), all_weights(trained))
    assert export_state_dict(model, source=source)[key].shape != state_dict[key].shape


@pytest.mark.parametrize(
    ("name", "position", "key", "make", "square", "native"),
    [
        # 225 = 15 * 15 = 9 * 25 offsets
        (
            "swin_t",
            "rpb",
            "layers.0.blocks.0.attn.relative_position_bias_table",
            {"image_size": (160, 416), "window_size": None},
            8,
            (5, 13),
        ),
        ("deit3_s16", "ape", "pos_embed", {"image_size": (32, 128)}, 4, (2, 8)),  # 16 tokens
    ],
)
def test_ambiguous_table_shapes_are_not_guessed(name, position, key, make, square, native):
    model, other = (small(name, position, **make, seed=seed) for seed in (0, 1))
    source = "swin" if name == "swin_t" else "deit"
    state_dict = export_state_dict(model, source=source)
    tables = [name for name in state_dict if "position_bias" in name or name == "pos_embed"]

    def convert(side, **others):
        grids = None if side is None else dict.fromkeys(tables, side) | others
        rope_jax.convert_state_dict(other, state_dict, source=source, grids=grids)

    choice = rf"{square}x{square} or, as in this model, of {native[0]}x{native[1]} tokens"
    with pytest.raises(ValueError, match=rf"{re.escape(key)} may be of {choice}: say which"):
        convert(None)
    convert(native)
    assert_same(other, model)
    convert((square, square))
    resized = export_state_dict(other, source=source)[key]
    assert not np.allclose(resized, state_dict[key], rtol=0, atol=0.01)
    with pytest.raises(ValueError, match=r"grids has norm\.weight, which is no table"):
        convert(native, **{"norm.weight": (1, 1)})
    with pytest.raises(ValueError, match=r"or a table of 3x3 tokens: correct grids"):
        convert((3, 3))


def test_files_of_swin_v2_show_the_window_of_pretraining():
    make = lambda window, position="cpb(hidden=8)": small(
        "swinv2_t", position, window_size=window, seed=window
    )
    model = make(4)
    weights, block = export_state_dict(model, source="swin"), "layers.1.blocks.1.attn"
    steps = np.linspace(-8, 8, 7, dtype=np.float32)
    steps = np.sign(steps) * np.log2(1 + np.abs(steps)) / 3
    table = np.stack(np.meshgrid(steps, steps, indexing="ij"), axis=-1)[None]
    weights |= {f"{block}.relative_coords_table": table, f"{block}.relative_position_index": table}
    other = make(4)
    rope_jax.convert_state_dict(other, weights, source="swin")
    assert_same(model, other)
    with pytest.raises(ValueError, match="the position and the windows that these weights"):
        rope_jax.convert_state_dict(make(2), weights, source="swin")
    with pytest.raises(ValueError, match=r"relative_coords_table of shape .* is not expected"):
        rope_jax.convert_state_dict(make(4, "none"), weights, source="swin")


def test_tables_of_neighbourhoods_are_not_resized():
    model = small("nat_s_tiny", "rpb", kernel_size=5)
    with pytest.raises(
        ValueError,
        match=r"layers.0.blocks.0.attn.rpb has shape \[1, 13, 13\], but .* takes \[1, 9, 9\]",
    ):
        rope_jax.convert_state_dict(
            model, export_state_dict(small("nat_s_tiny", "rpb"), source="nat"), source="nat"
        )


def test_all_problems_are_reported_at_once_without_changes():
    model, before = small("deit_ti16", "ape"), small("deit_ti16", "ape")
    state_dict = export_state_dict(small("deit_ti16", "ape", seed=1), source="deit")
    del state_dict["blocks.1.norm1.weight"]
    state_dict["dist_token"] = np.zeros((1, 1, 48), np.float32)
    state_dict["head.weight"] = np.zeros((7, 48), np.float32)
    state_dict["pos_embed"] = np.zeros((1, 1 + 17, 48), np.float32)
    state_dict["norm.bias"] = np.zeros(48, np.int64)
    with pytest.raises(ValueError, match="names of source='deit'; 5 problems:") as caught:
        rope_jax.convert_state_dict(model, state_dict, source="deit")
    for problem in (
        "blocks.1.norm1.weight is missing: it fills blocks.1.norm1.scale",
        "dist_token of shape [1, 1, 48] is not expected",
        "head.weight has shape [7, 48], but head.kernel of the model takes [5, 48]: create "
        "the model with num_classes=7",
        "pos_embed has shape [1, 18, 48], but position.ape.embedding of the model takes [1, 17, ",
        "norm.bias has dtype int64",
    ):
        assert f"\n  {problem}" in str(caught.value)
    assert_same(model, before)


@pytest.mark.parametrize(
    ("name", "position", "source", "advice"),
    [
        (
            "deit3_s16",
            "rope2d",
            "deit",
            "source 'deit' has no models whose position rotates: choose another position, or "
            "the source",
        ),
        (
            "deit_ti16",
            "rpb",
            "deit",
            "position.rpb.offsets of the model has no name in source 'deit': choose another "
            "source or position",
        ),
        (
            "deit_ti16",
            "ape",
            "dait",
            "source='dait' is unknown; did you mean 'deit'\\? known: .*deit, .*lape, ",
        ),
    ],
)
def test_models_that_a_source_cannot_hold_are_refused(name, position, source, advice):
    model = small(name, position)
    with pytest.raises(ValueError, match=advice):
        export_state_dict(model, source=source)
    with pytest.raises(ValueError, match=advice):
        rope_jax.convert_state_dict(model, {}, source=source)


def test_nested_checkpoints_are_refused():
    with pytest.raises(ValueError, match="holds dictionaries under model, optimizer: pass the one"):
        rope_jax.convert_state_dict(
            small("deit_ti16", "ape"), {"model": {}, "epoch": 3, "optimizer": {}}, source="deit"
        )


NOT_READ = np.full((1, 48), np.nan, np.float32)


@pytest.mark.parametrize(
    ("name", "options", "source", "extras"),
    [
        ("beit_b16", VIT, "timm", ["blocks.1.attn.relative_position_index"]),
        ("cat_5", VIT, "cat", [f"cv_head.layers.1.self_attn.pos.{x}" for x in ("cos", "sin")]),
        ("ceit_t", VIT, "ceit", []),
        ("dinov2_s14", VIT | {"image_size": 56}, "dinov2", ["mask_token"]),
        (
            "dinov3_s16",
            VIT,
            "dinov3",
            ["mask_token", "rope_embed.periods", "blocks.1.attn.qkv.bias_mask"],
        ),
        (
            "swin_t",
            STAGES | {"position": "rope_mixed+rpb"},
            "naver",
            [
                "layers.1.blocks.1.attn_mask",
                *(f"layers.1.blocks.1.attn.rope_t_{axis}" for axis in "xy"),
                "layers.1.blocks.1.attn.relative_position_index",
            ],
        ),
    ],
)
def test_derived_tensors_and_counts_of_official_files_are_dropped(name, options, source, extras):
    model = make_filled_model(name, **{"image_size": 64} | options)
    state_dict = export_state_dict(model, source=source)
    means = [key for key in state_dict if key.endswith("running_mean")]
    extras = [*extras, *(key.replace("running_mean", "num_batches_tracked") for key in means)]
    assert extras
    rope_jax.convert_state_dict(model, state_dict | dict.fromkeys(extras, NOT_READ), source=source)


def test_stored_frequencies_must_match_the_model():
    model = small("swin_t", "rope2d(base=50)")
    state_dict = export_state_dict(model, source="naver")
    ladder = np.float32(50) ** -(np.arange(4, dtype=np.float32) / 4)
    stored = np.stack([np.r_[ladder, 0 * ladder], np.r_[0 * ladder, ladder]])[:, None]
    state_dict |= {
        "layers.0.blocks.0.attn.rope_freqs": stored,
        "layers.1.blocks.0.attn.rope_freqs": np.tile(stored, (1, 2, 1)),
    }
    wrong = [small("swin_t", position) for position in ("rope2d", "rope1d", "rope2d(base=47)")]
    for dtype in (np.float32, np.float16, jnp.bfloat16):  # rounding does not make another table
        rounded = {key: array.astype(dtype) for key, array in state_dict.items()}
        rope_jax.convert_state_dict(model, rounded, source="naver")
        for other in wrong:
            with pytest.raises(ValueError, match=r"layers\.0\.blocks\.0\.attn\.rope_freqs"):
                rope_jax.convert_state_dict(other, rounded, source="naver")


SINES = sinusoids(1 + 4 * 4, VIT["width"]).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "position", "size", "source", "key", "table"),
    [
        # The file and the model have different maps.
        ("deit_ti16", "lape(sincos1d)", 96, "lape", "pos_embed", SINES),
        ("vit_lite_7_4", "sincos1d", 16, "cct", "classifier.positional_emb", SINES[None]),
        ("t2t_vit_7", None, 64, "t2t", "pos_embed", SINES[None]),
    ],
)
def test_stored_sinusoids_must_match_the_model(name, position, size, source, key, table):
    model = small(name, position, image_size=size)
    state_dict = export_state_dict(model, source=source)
    convert = lambda table: rope_jax.convert_state_dict(
        model, state_dict | {key: table}, source=source
    )
    convert(table)
    if source == "t2t":
        convert(table * (1 + np.float32(1.3e-4)))  # an average of 780,000 steps
    for other in (table[..., ::-1], table + 1e-3):
        with pytest.raises(ValueError, match=f"{key} is computed here, and is not what the file"):
            convert(other)
