"""Names of transformers: small models of that package, on reproducible weights."""

import json
import pathlib

import jax
import numpy as np
import pytest

import rope_jax
from rope_jax.weights import export_state_dict
from rope_jax.weights.load import load_weights
from tests.models import small
from tests.models.small import compile_read
from tests.parity import official
from tests.parity.test_convert import as_file
from tests.slow import some_slow

FILE = pathlib.Path(__file__).parents[1] / "data" / "transformers" / "golden.json"
CASES = json.loads(FILE.read_text())["cases"]
SIZES = {"width": 8, "depth": 2, "heads": 1, "patch_size": 4}
STAGES = {"width": 8, "depths": (1, 1), "heads": (1, 2)}
MODELS = {
    "vit": ("deit_ti16", SIZES),
    "dinov3": ("dinov3_s16_plus", SIZES | {"num_classes": 0}),
    "dinov2": ("dinov2_g14", SIZES | {"pooling": "class_mean"}),
    "beit": ("beit_b16", SIZES),
    "swin": ("swin_t", STAGES | {"window_size": 4, "image_size": 32}),
    "swinv2": ("swinv2_t", STAGES | {"window_size": 4, "image_size": 32}),
}
EXTRA = {"dinov3": "embeddings.mask_token", "dinov2": "dinov2.embeddings.mask_token"}


def abstract(name, **settings):
    return small.abstract(name, **{"num_classes": 3, "image_size": 16} | settings)


@pytest.mark.parametrize("name", some_slow(MODELS, ["vit", "dinov3"]))
def test_results_are_those_of_transformers(name):
    model_name, settings = MODELS[name]
    case, model = CASES[name], abstract(model_name, **settings)
    weights = {key: official.tensor(key, *about) for key, about in case["keys"].items()}
    load_weights(model, as_file(weights))  # the source is found by the names
    images = official.images(*case["size"])
    with jax.default_matmul_precision("highest"):
        whole = model.num_classes == 0
        output = compile_read(model, lambda model, x, _: (model.encode if whole else model)(x))
        np.testing.assert_allclose(output(images), case["output"], rtol=0, atol=1e-5)
    weights.pop(EXTRA.get(name), None)
    official.assert_equal(export_state_dict(model, source="transformers"), weights)


def test_files_of_a_backbone_begin_with_no_name_of_an_architecture(capsys):
    weights = {key: official.tensor(key, *x) for key, x in CASES["vit"]["keys"].items()}
    bare = {key.removeprefix("vit."): x for key, x in weights.items() if key[:3] == "vit"}
    bare |= {"pooler.dense.weight": np.zeros((8, 8)), "pooler.dense.bias": np.zeros(8)}
    model = abstract("deit_ti16", **SIZES | {"num_classes": 0})
    load_weights(model, as_file(bare))
    expected = weights["vit.layernorm.weight"]
    np.testing.assert_array_equal(model.norm.scale[...], expected)
    del bare["encoder.layer.1.output.dense.bias"]
    model = abstract("deit_ti16", **SIZES)
    with pytest.raises(
        ValueError, match=r"1 problem:\n  encoder\.layer\.1\.output\.dense\.bias is"
    ):
        load_weights(model, as_file(bare), new_head=True)


def test_names_tell_dilated_attention():
    """NAT and DiNAT have the same parameters."""
    stages = STAGES | {"image_size": 32, "kernel_size": 3}
    weights = export_state_dict(
        rope_jax.create_model("nat_mini", num_classes=3, **stages), source="transformers"
    )
    with pytest.raises(ValueError, match=r"nat\.layernorm\.weight .* is not expected"):
        load_weights(abstract("dinat_mini", **stages), as_file(weights))
    load_weights(abstract("nat_mini", **stages), as_file(weights))
