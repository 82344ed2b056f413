"""`create_model` with a head: maps of every backbone, its file, and weights of classifiers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.heads import HEADS
from rope_jax.models.registry import find_model
from rope_jax.weights import export_state_dict, load_pretrained
from rope_jax.weights.own import OWN
from tests.models.heads import test_dino, test_mask2former
from tests.models.small import abstract, abstract_call, make_filled_model
from tests.parity.official import assert_equal
from tests.slow import some_slow

TINY = {"width": 8, "heads": 1, "depth": 4, "image_size": 64}
CLASSES = {"num_classes": 3}
UPERNET = {"head": "upernet(width=4,auxiliary_width=4)", "num_classes": 3}
DENSE = TINY | UPERNET
BARE = TINY | {"groups": (0, 1, 2, 3), "deform_heads": 1, "prior_width": 4}
ADAPTER = UPERNET | BARE


def shallow(name):
    """Options for a model of at most four blocks, or two per stage, which is faster to trace.

    A ViT-Adapter keeps its blocks, in which its groups are counted, and two plain ViTs, of 12 and
    24 blocks, for those that heads take by default.
    """
    options = find_model(name).options
    if name.startswith("vit_adapter") or name in ("deit_ti16", "deit3_l16"):
        return {}
    if hasattr(options, "depths"):
        return {"depths": tuple(min(depth, 2) for depth in options.depths)}
    return {"depth": min(options.depth, 4)}


@pytest.fixture(scope="module")
def dense():
    """A ViT with UperNet."""
    return rope_jax.create_model("deit_ti16", seed=3, **DENSE)


@pytest.fixture(scope="module")
def classifier():
    """The weights of a DeiT, whose table of positions has an entry for its class token."""
    return rope_jax.create_model("deit_ti16", seed=1, num_classes=5, **TINY)


SERVED = [
    (name, head)
    for name in rope_jax.list_models()
    for head in ("linear", "segmenter", "upernet", "mask2former(pixel_depth=1,depth=3)")
]


@pytest.mark.parametrize(
    ("name", "head"), some_slow(SERVED, [pair for pair in SERVED if pair[0] == "deit_ti16"])
)
def test_backbones_serve_heads_or_name_those_they_serve(name, head):
    size = 56 if "14" in name else 64
    settings = {"head": head, "num_classes": 2, "image_size": size, **shallow(name)}
    settings |= {"operator": "released"} if name == "cat_5" else {}
    one_map = head in ("linear", "segmenter")
    refusal = None
    if name == "cct_2_3x2" and not one_map:
        refusal = "4 blocks, and cct_2_3x2 has 2: use a deeper"
    elif name.startswith("vit_adapter") and one_map:
        refusal = "one map, .* use mask2former or upernet or"
    elif (name, head) == ("vit_digits", "segmenter"):
        refusal = "width=96, .* by head_dim=64"
    if refusal is not None:
        with pytest.raises(ValueError, match=refusal):
            abstract(name, **settings)
    else:
        logits = abstract_call(abstract(name, **settings), size, 2 * size)
        assert logits.shape == (1, size, 2 * size, 2)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("cct_7_3x1", {"head": "upernets"}, "unknown head 'upernets'; did you mean 'upernet'"),
        ("deit_ti16", {"head": "upernet(wide=3)"}, "head 'upernet' has no option 'wide'"),
        ("deit_ti16", {"head": "upernet(dropout=1.5)"}, "dropout must be .*, not 1.5"),
        ("deit_ti16", {"head": "segmenter(head_dim=7)"}, "head_dim=7"),
        ("deit_ti16", {"head": "dino(width=40)"}, "width=40, .* by groups=32"),
        ("deit_ti16", {"head": "dino(width=32,heads=3)"}, "not divisible by heads=3"),
        ("deit_ti16", {"head": "dino(width=6,groups=2,heads=2)"}, "sines"),
        ("vit_adapter_ti16", {"head": "linear"}, "one map, which vit_adapter_ti16 does n.* use"),
        (
            "deit_ti16",
            {"head": "linear", "num_classes": None},
            "the head 'linear' needs num_classes",
        ),
        (
            "deit_ti16",
            {"head": "linear", "num_classes": -1},
            "num_classes must be a whole number of at least 0, not -1",
        ),
        ("deit_ti16", {"head": "linear+upernet"}, "must be the text of one head"),
        ("deit_ti16", {"blocks": (3,)}, r"blocks=\(3,\) are those of a head: name it"),
        ("deit_ti16", {"head": "linear", "blocks": (3, 5)}, r"blocks=\(3, 5\) must be one number"),
        ("deit_ti16", {"head": "linear", "blocks": (-1,)}, r"blocks=\(-1,\) .*, from 0 to 11, as"),
        (
            "deit_ti16",
            {"head": "upernet", "blocks": (3, 2, 1, 0)},
            r"blocks=\(3, 2, 1, 0\) must be 4 numbers of blocks in ascending order, from 0 to 11, "
            "as the model has 12 blocks",
        ),
        ("deit_ti16", {"head": "upernet", "depth": 3}, "4 blocks, and deit_ti16 has 3"),
        ("swin_t", {"head": "upernet", "blocks": (1,)}, "are of isotropic models"),
        ("swin_t", {"head": "linear", "blocks": (1,)}, "are of isotropic models"),
        ("deit_ti16", {"head": "linear", "last_norm": False}, "last_norm=False .* normalised"),
        ("swin_t", {"head": "upernet", "last_norm": True}, "on swin_t, whose maps have norms of"),
        ("swin_t", {"head": "upernet(neck=none)"}, "neck=none is of isotropic models: the maps of"),
        (
            "deit_ti16",
            {"head": "upernet(neck=fpn)"},
            "neck must be one of deconv, multilevel, none",
        ),
        (
            "deit_ti16",
            {"head": "upernet(auxiliary_map=4)"},
            "auxiliary_map must be a whole number of at least 0 and at most 3, not 4",
        ),
    ],
)
def test_unsuitable_heads_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        abstract(name, **{"num_classes": 3} | settings)


@pytest.mark.parametrize("name", ["deit_ti16", "swin_t", "nat_mini", "vit_adapter_ti16"])
def test_a_custom_head_of_four_maps_may_be_normalised(name, monkeypatch):
    class Own(HEADS["upernet"].family):
        normalised = True

    monkeypatch.setitem(HEADS, "own", dataclasses.replace(HEADS["upernet"], family=Own))
    model = abstract(name, head="own(width=4)", num_classes=3, image_size=64)
    assert abstract_call(model, 64, 96).shape == (1, 64, 96, 3)


def test_images_with_too_small_maps_are_refused(dense):
    with pytest.raises(ValueError, match="images of 16x32 pixels give this head maps of less than"):
        abstract_call(dense, 16, 32)


@pytest.mark.usefixtures("unchecked_annotations")
def test_images_of_another_shape_are_refused(dense):
    for model in (dense, dense.backbone, abstract("swin_t")):
        for shape in ((32, 32, 3), (1, 3, 32, 32)):
            with pytest.raises(ValueError, match=r"images have shape .* must be \[B, H, W, 3\]"):
                model.features(jnp.zeros(shape))
        with pytest.raises(ValueError, match=r"must be \[B, H, W, 3\]"):
            model(jnp.zeros((32, 32, 3)))


def test_a_saved_model_with_a_head_is_created_again(dense, tmp_path, capsys):
    dense.class_names = ("a", "b", "c")
    rope_jax.save_pretrained(dense, tmp_path)
    again = rope_jax.create_model(tmp_path)
    described = (again.head_notation, again.blocks, again.class_names)
    assert described == (dense.head_notation, (0, 1, 2, 3), ("a", "b", "c"))
    assert_equal(export_state_dict(again, source=OWN), export_state_dict(dense, source=OWN))
    other = abstract("deit_ti16", **DENSE | {"num_classes": 2})
    load_pretrained(other, tmp_path, new_head=True)
    assert capsys.readouterr().out.endswith("head: new, 2 classes\n")
    np.testing.assert_array_equal(other.neck.up.kernel[...], dense.neck.up.kernel[...])


def test_another_head_starts_from_the_saved_backbone(dense, tmp_path, capsys):
    rope_jax.save_pretrained(dense, tmp_path)
    other = make_filled_model("deit_ti16", head="dino(width=32)", num_classes=3, **TINY)
    head = export_state_dict(other.head, source=OWN)
    load_pretrained(other, tmp_path)
    loaded, saved = (export_state_dict(x.backbone, source=OWN) for x in (other, dense))
    assert_equal(loaded, saved)
    assert_equal(export_state_dict(other.head, source=OWN), head)
    assert capsys.readouterr().out.endswith("with the head 'upernet': new neck, head\n")
    linear = abstract("deit_ti16", head="linear", num_classes=3, **TINY)  # of normalised maps
    load_pretrained(linear, tmp_path)
    assert capsys.readouterr().out.endswith("'upernet': new norm, head\n")


def test_a_saved_model_takes_a_head_of_another_kind(dense, tmp_path):
    rope_jax.save_pretrained(dense, tmp_path)
    linear = abstract(tmp_path, head="linear", num_classes=2)
    new = abstract("deit_ti16", head="linear", num_classes=2, **TINY)
    assert (linear.blocks, linear.map_norm, linear.options) == ((3,), new.map_norm, new.options)


LINEAR = TINY | CLASSES | {"head": "linear"}
PLAIN = DENSE | {"head": "upernet(width=4,auxiliary_width=0,neck=none)"}
BACKBONE = TINY | {"num_classes": 0}
ADAPTED = BARE | {"num_classes": 0}
WINDOWS = {"attention": "window", "window_size": 2, "window_padding": "qkv"}
REFUSED = {
    "with the head 'upernet', and this model is a classifier": (DENSE, TINY | CLASSES),
    "depth is 4 there and 5 here": (DENSE, LINEAR | {"depth": 5}),
    r"head\.neck is none there and multilevel here": (
        PLAIN,
        PLAIN | {"head": PLAIN["head"].replace("none", "multilevel")},
    ),
    # Only backbones of dense prediction drop a class token or a last norm without an error.
    "class_token is True there and False here.*Create that model": (
        TINY,
        BACKBONE | {"class_token": False, "pooling": "mean"},
    ),
    "last_norm is True there and False here": (TINY, BACKBONE | {"last_norm": False}),
    # The head of its classes reads no class token.
    "class_token is True there and False here": (
        TINY,
        BARE | {"name": "vit_adapter_ti16", "num_classes": 5},
    ),
    "attention is global there and window here": (
        ADAPTED | {"name": "vit_adapter_ti16"},
        ADAPTED | WINDOWS | {"name": "vit_adapter_ti16"},
    ),
    "this model has the head 'linear': use weights of the sa": (DENSE, LINEAR),
}


@pytest.mark.parametrize("message", REFUSED)
def test_files_of_other_models_are_refused(message, tmp_path):
    saved, loaded = ({"name": "deit_ti16"} | settings for settings in REFUSED[message])
    source = "mmseg" if "use weights" in message else None
    rope_jax.save_pretrained(make_filled_model(**saved), tmp_path, source=source)
    with pytest.raises(ValueError, match=message):
        load_pretrained(abstract(**loaded), tmp_path)


def test_a_file_restores_blocks_neck_and_last_norm(tmp_path):
    linear = make_filled_model("deit_ti16", head="linear", blocks=(1,), num_classes=2, **TINY)
    rope_jax.save_pretrained(linear, tmp_path)
    assert abstract(tmp_path).blocks == (1,)
    rope_jax.save_pretrained(make_filled_model("deit_ti16", **PLAIN, last_norm=True), tmp_path)
    again = rope_jax.create_model(tmp_path)
    assert (again.neck, again.map_norm, again.options.last_norm) == (None, None, True)


def test_a_missing_patch_bias_loads_as_zero(tmp_path):
    """Files of mmsegmentation's ViT have none by default."""
    model, other = (make("deit_ti16", **PLAIN) for make in (make_filled_model, abstract))
    weights = export_state_dict(model, source="mmseg")
    assert weights.pop("backbone.patch_embed.projection.bias").any()
    np.savez(tmp_path / "vit.npz", **weights)
    load_pretrained(other, tmp_path / "vit.npz")
    assert not other.backbone.patch_embed.proj.bias[...].any()


def test_an_epsilon_unlike_the_classifiers_is_reported(classifier, tmp_path, capsys):
    """Segmenter's encoder has an epsilon of 1e-5 with weights trained with 1e-6."""
    rope_jax.save_pretrained(classifier, tmp_path)
    used = "weights of a classifier: new head, not used head.bias, head.kernel"
    for epsilon, note in ((1e-5, ", norm_epsilon=1e-05, trained with 1e-06"), (1e-6, "")):
        model = abstract("deit_ti16", norm_epsilon=epsilon, **TINY | {"head": "linear"} | CLASSES)
        load_pretrained(model, tmp_path)
        assert capsys.readouterr().out == f"{used}{note}\n"


@pytest.mark.parametrize("source", [None, "timm"])
def test_a_classifier_fills_the_backbone(source, classifier, tmp_path, capsys):
    path = tmp_path / "deit.safetensors"
    rope_jax.save_pretrained(classifier, path, source=source)
    model = abstract("deit_ti16", **DENSE)
    load_pretrained(model, path)
    expected, loaded = (export_state_dict(x, source=OWN) for x in (classifier, model.backbone))
    assert_equal(loaded, {name: expected[name] for name in loaded})
    message = "weights of a classifier: new neck, head, not used head."
    assert capsys.readouterr().out.startswith(message)


@pytest.mark.parametrize(
    ("source", "size"), [(None, 64), ("timm", 96), pytest.param(None, 96, marks=pytest.mark.slow)]
)
def test_a_backbone_without_class_token_skips_its_entries(
    source, size, classifier, tmp_path, capsys
):
    """ViT-Adapter starts from a DeiT; its table is that of the patches, resized by the rule."""
    path = tmp_path / "deit.safetensors"
    rope_jax.save_pretrained(classifier, path, source=source)
    settings = ADAPTER | {"image_size": size}
    model = abstract("vit_adapter_ti16", **settings)
    load_pretrained(model, path)
    resized = nnx.clone(classifier)
    resized.resize(size)
    table = resized.position.embedding[1:]
    np.testing.assert_allclose(model.backbone.position.embedding, table, atol=1e-6)
    kernels = (x.blocks[3].mlp.fc2.kernel[...] for x in (model.backbone, classifier))
    np.testing.assert_array_equal(*kernels)
    new = "classifier: new prior, levels, interactions, up, map_norms, blocks.{i}.scale, head, not"
    message = capsys.readouterr().out
    assert new in message
    assert ("cls_token" if source else "class_token") in message


def test_saved_vit_adapters_are_not_taken_for_classifiers(tmp_path, capsys):
    rope_jax.save_pretrained(make_filled_model("vit_adapter_ti16", **ADAPTED), tmp_path)
    load_pretrained(abstract("vit_adapter_ti16", **ADAPTED), tmp_path)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"class_token": False, "pooling": "mean"}, "class_token"),
        ({"last_norm": False}, "norm.scale"),
    ],
)
def test_a_model_without_classes_keeps_strict_loading(settings, key, classifier):
    model, weights = (
        abstract("deit_ti16", **BACKBONE | settings),
        export_state_dict(classifier, source=OWN),
    )
    with pytest.raises(ValueError, match=f"{key} of shape .* is not expected"):
        rope_jax.convert_state_dict(model, weights, source=OWN)


INDEX = np.zeros((49, 49), np.int64)
SWIN_DINO = test_dino.SWIN | {"head": test_dino.HEAD, "num_classes": 3}
SWIN_MASKS = test_mask2former.SWIN | {"head": test_mask2former.SMALL, "window_padding": "tokens"}
DETREX = {
    "transformer.decoder.class_embed.2.bias": (3,),
    "transformer.decoder.layers.0.attentions.0.attn.in_proj_weight": (48, 16),
    "label_enc.weight": (3, 16),
}
# Official files have these twice.
TWICE = {f"class_embed.{layer}.weight": np.zeros((3, 16), np.float32) for layer in range(3)}
ADAPTER_SHAPES = {
    "backbone.spm.conv2.0.weight": (8, 4, 3, 3),
    "backbone.norm4.running_var": (8,),
    "backbone.pos_embed": (1, 17, 8),
    "decode_head.conv_seg.weight": (3, 4, 1, 1),
    "auxiliary_head.convs.0.conv.weight": (4, 8, 3, 3),
}
SEGMENTER = TINY | CLASSES | {"head": "segmenter(head_dim=8)"}
SEGMENTER_SHAPES = {
    "backbone.layers.0.attn.attn.in_proj_weight": (24, 8),
    "decode_head.patch_proj.weight": (8, 8),
}
COUNTED = {"decode_head.fpn_bottleneck.bn.num_batches_tracked": np.int64(7)}


def test_mmsegmentation_transposes_two_arrays_of_the_authors_segmenter():
    model = make_filled_model("deit_ti16", **SEGMENTER)
    mmseg, authors = (export_state_dict(model, source=name) for name in ("mmseg", "segmenter"))
    for name, other in (("patch_proj", "proj_patch"), ("classes_proj", "proj_classes")):
        weight = mmseg[f"decode_head.{name}.weight"]
        np.testing.assert_array_equal(weight.T, authors[f"decoder.{other}"])


@pytest.mark.parametrize(
    ("name", "settings", "source", "shapes", "more"),
    [
        ("deit_ti16", SEGMENTER, "mmseg", SEGMENTER_SHAPES, {}),
        ("deit_ti16", SEGMENTER, "segmenter", {"decoder.proj_patch": (8, 8)}, {}),
        ("vit_adapter_ti16", ADAPTER, "vit_adapter", ADAPTER_SHAPES, COUNTED),
        pytest.param(
            "vit_adapter_ti16", ADAPTER, "mmseg", ADAPTER_SHAPES, COUNTED, marks=pytest.mark.slow
        ),
        (
            "deit_ti16",
            test_dino.VIT | {"head": test_dino.HEAD, "num_classes": 3},
            "detrex",
            DETREX
            | {
                "backbone.net.blocks.0.attn.qkv.weight": (48, 16),
                "backbone.simfp_3.0.weight": (16, 8, 2, 2),
            },
            TWICE,
        ),
        (
            "swin_t",
            SWIN_DINO,
            "detrex",
            DETREX
            | {
                "backbone.layers.1.blocks.0.attn.qkv.weight": (48, 16),
                "backbone.norm3.weight": (64,),
                "neck.extra_convs.0.conv.weight": (16, 64, 3, 3),
            },
            TWICE,
        ),
        (
            "swin_t",
            SWIN_MASKS | CLASSES,
            "mask2former",
            {
                "backbone.patch_embed.proj.weight": (8, 3, 4, 4),
                "backbone.layers.1.blocks.0.attn.relative_position_bias_table": (169, 1),
                "backbone.layers.0.downsample.reduction.weight": (16, 32),
                "backbone.norm3.weight": (64,),
                "sem_seg_head.pixel_decoder.adapter_1.weight": (16, 8, 1, 1),
                "sem_seg_head.pixel_decoder.layer_1.weight": (16, 16, 3, 3),
                "sem_seg_head.predictor.query_feat.weight": (6, 16),
                "sem_seg_head.predictor.transformer_ffn_layers.2.linear1.weight": (32, 16),
                "sem_seg_head.predictor.class_embed.weight": (4, 16),
            },
            {
                "criterion.empty_weight": np.ones(4, np.float32),
                "backbone.layers.0.blocks.0.attn.relative_position_index": INDEX,
            },
        ),
    ],
)
def test_official_names_of_models_with_heads(name, settings, source, shapes, more):
    """Backbone and head are named as in published checkpoints, which hold more than parameters."""
    model, other = (make(name, **settings) for make in (make_filled_model, abstract))
    weights = export_state_dict(model, source=source)
    assert {key: weights[key].shape for key in shapes} == shapes
    rope_jax.convert_state_dict(other, weights | more, source=source)
    assert_equal(export_state_dict(other, source=OWN), export_state_dict(model, source=OWN))
