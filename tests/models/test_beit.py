"""BEiT: initialisation and files; `tests/parity` compares its logits with timm's."""

import math

import numpy as np
import pytest

import rope_jax
from rope_jax.weights import export_state_dict, load_pretrained
from rope_jax.weights.convert import name_table
from tests.parity.official import assert_equal, tensor


def small(*, size=(6, 10), **options):
    """A model of 3 x 5 patches."""
    sizes = {"width": 24, "heads": 3, "depth": 2, "num_classes": 5, "patch_size": 2}
    return rope_jax.create_model("beit_b16", image_size=size, **sizes | options)


@pytest.mark.parametrize("scan", [False, True])
def test_deeper_layers_start_smaller_and_so_does_the_head(scan):
    model, plain = (
        rope_jax.create_model(
            name,
            position="none",
            depth=3,
            width=48,
            heads=3,
            layer_scale=0.1,
            k_bias=False,
            scan_layers=scan,
            **options,
        )
        for name, options in (
            ("beit_b16", {}),
            ("deit_b16", {"pooling": "mean", "pool_norm": True}),
        )
    )
    for layer in range(3):
        for path in (("attn", "proj"), ("attn", "qkv"), ("mlp", "fc1"), ("mlp", "fc2")):
            scaled, reference = (kernel(m, layer, path, scan) for m in (model, plain))
            factor = math.sqrt(2 * (layer + 1)) if path[1] in ("proj", "fc2") else 1
            np.testing.assert_allclose(scaled * factor, reference, rtol=1e-6)
    np.testing.assert_allclose(model.head.kernel[...] * 1000, plain.head.kernel[...], rtol=1e-6)


def kernel(model, layer, path, scan):
    block = model.blocks if scan else model.blocks[layer]
    value = getattr(getattr(block, path[0]), path[1]).kernel[...]
    return value[layer] if scan else value


TABLE = "blocks.1.attn.relative_position_bias_table"


def test_resizing_tables_keeps_the_entries_of_the_class_token(tmp_path):
    weights = export_state_dict(small(size=(12, 12)), source="timm")
    assert weights[TABLE].shape == (11 * 11 + 3, 3)
    weights[TABLE] = tensor(TABLE, (11 * 11 + 3, 3), "table")
    model = small()
    rope_jax.convert_state_dict(model, weights, source="timm")
    np.testing.assert_array_equal(model.position.prefix_offsets[...][1], weights[TABLE][-3:].T)
    resized = small(size=(12, 12))
    rope_jax.convert_state_dict(resized, weights, source="timm")
    resized.resize((6, 10))
    np.testing.assert_allclose(
        model.position.offsets[...], resized.position.offsets[...], rtol=0, atol=1e-6
    )
    # A model that was saved with another rule keeps it; its weights are the same.
    rope_jax.save_pretrained(small(position="rpb(prefix=True,std=0)"), tmp_path)
    assert rope_jax.create_model(tmp_path).position.grow == "bicubic"
    load_pretrained(resized, tmp_path)
    assert (resized.position.grow, resized.position.shrink) == ("geometric", "geometric")
    weights[TABLE] = np.zeros((122, 3), np.float32)
    with pytest.raises(ValueError, match=r"\[122, 3\], but position.rpb.offsets.1 .* \[45, 3\]"):
        rope_jax.convert_state_dict(model, weights, source="timm")
    with pytest.raises(ValueError, match=r"position\.rpb\.offsets .* no name in source 'timm'"):
        export_state_dict(small(position="rpb"), source="timm")
    assert name_table(model, "timm").preprocessing.mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("source", "table", "common", "others"),
    [
        (
            "timm",
            "blocks.{}.attn.relative_position_bias_table",
            "rel_pos_bias.relative_position_bias_table",
            ("mask_token", "rel_pos_bias.relative_position_index", "lm_head.weight"),
        ),
        (
            "transformers",
            "beit.encoder.layer.{}.attention.attention."
            "relative_position_bias.relative_position_bias_table",
            "beit.encoder.relative_position_bias.relative_position_bias_table",
            ("beit.embeddings.mask_token", "lm_head.bias"),
        ),
    ],
    ids=["timm", "transformers"],
)
def test_files_of_pretraining_have_one_table_for_all_blocks(source, table, common, others):
    """Its norm is that of the tokens, and it has no head."""
    make = lambda size: small(size=size, pool_norm=False, num_classes=0)
    weights = export_state_dict(make((12, 12)), source=source)
    names = [table.format(i) for i in range(2)]
    shared = tensor("table", weights[names[0]].shape, "table")
    expected, model = make((6, 10)), make((6, 10))
    rope_jax.convert_state_dict(expected, weights | dict.fromkeys(names, shared), source=source)
    file = {key: array for key, array in weights.items() if key not in names}
    file |= dict.fromkeys(others, np.zeros(3, np.float32)) | {common: shared}
    rope_jax.convert_state_dict(model, file, source=source)
    assert_equal(*(export_state_dict(m, source=source) for m in (model, expected)))
    np.testing.assert_array_equal(model.position.prefix_offsets[...][0], shared[-3:].T)
    with pytest.raises(ValueError, match=f"{names[1]} is missing"):
        rope_jax.convert_state_dict(model, file | {names[0]: file.pop(common)}, source=source)
