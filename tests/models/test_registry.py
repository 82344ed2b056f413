"""Models by name: the list, and refusals with their advice."""

import dataclasses
import inspect
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.models.registry import find_model
from rope_jax.models.vit import ViTOptions
from tests.models.small import abstract, abstract_call
from tests.postponed import PostponedOptions

WINDOWS = {"attention": "window"}


@pytest.mark.parametrize(
    ("name", "epsilon", "position"),
    [
        ("dinov2_s14", 1e-6, "ape(resize=dinov2)"),
        ("dinov2_s14_reg", 1e-6, "ape(resize=antialias)"),
        ("dinov3_s16", 1e-5, "dinov3"),
        ("vit_lite_7_4", 1e-5, "ape(std=0.2,resize=bilinear)"),
        ("deit_s16", 1e-6, "ape"),
        ("deit3_s16", 1e-6, "ape"),
        ("vit_s16", 1e-5, "axial_rope"),
        ("vit_b16", 1e-5, "axial_rope"),
        ("vit_s16_h6", 1e-5, "axial_rope"),
        ("vit_digits", 1e-5, "axial_rope"),
        ("vit_adapter_s16", 1e-6, "ape"),
        ("nat_isotropic_s16", 1e-5, "none"),
        ("dinat_isotropic_s16", 1e-5, "rpb"),
    ],
)
def test_defaults_match_the_official_code(name, epsilon, position):
    groups = {"depth": 4, "groups": (0, 1, 2, 3)}
    model = abstract(name, **groups if name.startswith("vit_adapter") else {"depth": 1})
    assert (model.options.norm_epsilon, model.notation) == (epsilon, position)


def test_initial_weights_follow_the_seed():
    make = lambda seed: rope_jax.create_model("vit_digits", position="ape", depth=1, seed=seed)
    first, again, other = (
        nnx.to_flat_state(nnx.state(make(seed), nnx.Param)) for seed in (3, 3, 4)
    )
    for (path, x), (_, same), (_, unlike) in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(x, same)
        assert np.any(x[...] != unlike[...]) == (np.std(x[...]) > 0), path


@pytest.mark.parametrize(
    ("name", "options", "advice"),
    [
        (
            "deit_s",
            {},
            "unknown model 'deit_s'; the nearest are 'deit_s16', 'ceit_s', 'deit3_s16'; "
            "rope_jax.list_models() lists all",
        ),
        ("deit_base_patch16_224.fb_in1k", {}, "' is 'deit_b16' here; rope_jax.list_models() lists"),
        (
            "vit_small_patch16_rope_mixed_ape_224",
            {},
            "' is 'deit3_s16' here, with position='rope_mixed+ape'; rope_jax.list_models()",
        ),
        ("vit_base_patch16_rope_224", {}, "' is 'deit3_b16' here, with position='rope2d'"),
        ("vit_large_patch14_reg4_dinov2.lvd142m", {}, "' is 'dinov2_l14_reg' here"),
        ("swin_tiny_patch4_window7_224", {}, "' is 'swin_t' here"),
        ("swinv2_small_window16_256.ms_in1k", {}, "' is 'swinv2_s' here"),
        (
            "vit_s16",
            {"img_size": 224},
            "vit_s16 has no option 'img_size'; here it is 'image_size'",
        ),
        ("vit_s16", {"features_only": True}, "'features_only'; model.features(images) returns"),
        ("vit_s16", {"embed_dim": 96}, "here it is 'width'"),
        ("vit_s16", {"num_class": 9}, "did you mean 'num_classes'?"),
        ("resnet50", {}, "unknown model 'resnet50'; "),
        ("deit_small", {}, "'deit_small' is 'deit_s16' here"),
        ("vit_base_patch16_clip_224", {}, "'vit_base_patch16_clip_224'; the nearest are"),
        ("vit-base-patch16-224", {}, "'vit-base-patch16-224' is 'deit_b16' here"),
        (
            "vit_s16",
            {"dept": 2},
            "vit_s16 has no option 'dept'; did you mean 'depth'? known: mlp_ratio, layer_scale,",
        ),
        (
            "vit_s16",
            {"colour": 2},
            "vit_s16 has no option 'colour'; known: mlp_ratio, layer_scale,",
        ),
        ("vit_s16", {"depth": "2"}, "depth must be a whole number of at least 1, not '2'"),
        ("vit_s16", {"depth": 0}, "depth must be a whole number of at least 1, not 0"),
        ("vit_s16", {"heads": 5}, "width=384, which is not divisible by heads=5"),
        (
            "vit_s16",
            {"drop_path": 1.0},
            "drop_path must be a number of at least 0 and below 1, not 1.0",
        ),
        (
            "vit_s16",
            {"drop_path": -0.1},
            "drop_path must be a number of at least 0 and below 1, not -0.1",
        ),
        (
            "vit_s16",
            {"drop_path_schedule": "cosine"},
            "drop_path_schedule must be one of linear, constant, not 'cosine'",
        ),
        (
            "vit_s16",
            {"attention": "local"},
            "attention must be one of global, neighborhood, window, not 'local'",
        ),
        ("deit_s16", {"attention": "neighborhood"}, "does not support a class token"),
        ("vit_s16", {"attention": "window", "registers": 2}, "does not support a class token and"),
        ("vit_s16", {"attention": "window", "global_blocks": (12,)}, "global_blocks=(12,)"),
        ("vit_s16", {"attention": "window", "global_blocks": (1, 0)}, "global_blocks=(1, 0)"),
        ("vit_s16", {"window_padding": "zeros"}, "window_padding must be"),
        (
            "vit_s16",
            {"window_size": 7},
            "window_size is read with attention='window', and the model",
        ),
        ("vit_s16", WINDOWS | {"dilation": 2}, "dilation is read with attention='neighborhood'"),
        ("vit_s16", WINDOWS | {"window_padding": "qkv", "position": "lpe"}, "window_padding='qkv'"),
        ("vit_s16", WINDOWS | {"window_box": "own", "position": "comrope"}, "window_box='own'"),
        ("dinov2_s14", {"registers": -1}, "registers must be"),
        ("dinov2_s14", {"pooling": "max"}, "pooling must be"),
        ("dinov2_s14", {"pooling": "class", "class_token": False}, "pooling='class'"),
        ("deit_s16_distilled", {"pooling": "mean"}, "leave class_token, pooling and pool_norm"),
        ("vit_s16", {"distilled": True}, "distilled=True has a head of the class token and one of"),
        ("dinov2_s14", {"feed_forward": "glu"}, "feed_forward must be"),
        ("dinov2_s14", {"token_std": -1.0}, "token_std must be"),
        ("vit_adapter_s16", {"groups": (0, 1)}, "groups=(0, 1) must be numbers of blocks"),
        ("vit_adapter_s16", {"groups": (1, 11)}, "groups=(1, 11): change either"),
        ("vit_adapter_s16", {"patch_size": 8}, "patch_size=8"),
        ("vit_adapter_s16", {"deform_heads": 7}, "heads=7"),
        ("cct_7_3x1", {"attention_dropout": 1.0}, "attention_dropout must be"),
        ("cct_7_3x1", {"conv_layers": -1}, "conv_layers must be"),
        ("cct_7_3x1", {"conv_stride": 0}, "conv_stride must be"),
        ("cct_7_3x1", {"patch_size": 4}, "patch_size=4 does not match 1 conv_layers"),
        ("cct_7_3x1", {"attention": "neighborhood"}, "attention='neighborhood' is not an option"),
        ("vit_lite_7_4", {"layer_scale": 0.1}, "layer_scale=0.1 is not an option"),
        ("ceit_t", {"scan_layers": True}, "scan_layers=True is not an option"),
        ("ceit_t", {"class_token": False}, "class_token=False is not an option"),
        ("ceit_t", {"patch_size": 18}, "patch_size=18"),
        ("ceit_t", {"stem_width": 0}, "stem_width must be"),
        ("ceit_t", {"image_size": 40}, "image size 40x40"),
        ("t2t_vit_7", {"patch_size": 8}, "patch_size=8 is not an option"),
        ("t2t_vit_7", {"token_width": 0}, "token_width must be"),
        ("t2t_vit_7", {"random_features": 65}, "at most token_width=64"),
        ("t2t_vit_7", {"performer_dropout": 1.0}, "performer_dropout must be"),
        ("t2t_vit_7", {"logit_scale": "D"}, "logit_scale must be"),
        ("t2t_vit_7", {"image_size": (2, 9)}, "image size 2x9 is too small"),
        ("cat_5", {"operator": "axial"}, "operator must be"),
        ("cat_5", {"imprint": "late"}, "imprint must be"),
        ("cat_5", {"pool": "class"}, "pool must be"),
        ("cat_5", {"imprint": "none", "imprint_token": True}, "imprint='none'"),
        ("cat_5", {"imprint": "none", "imprint_layers": (0,)}, "imprint='none'"),
        ("cat_5", {"imprint": "linear", "imprint_layers": ()}, "imprint_layers=()"),
        ("cat_5", {"imprint_layers": (1, 5)}, "imprint_layers=(1, 5) must be numbers of blocks"),
        ("cat_5", {"pool": "mean", "imprint_token": True}, "pool='mean'"),
        ("cat_5", {"class_token": True}, "class_token=True is not an option"),
        ("cat_5", {"image_size": (64, 96)}, "maps must be square"),
        ("cat_5", {"image_size": (64, 65)}, "image size 64x65"),
        ("cat_5", {"position": "cat_rope+rpb"}, "adds a bias to the logits of a softmax"),
        ("swin_t", {"heads": (2,)}, "heads=(2,)"),
        ("swin_t", {"depths": (2, 2, 2, 0)}, "depths must be"),
        ("swin_t", {"heads": (3, 6, 12, 25)}, "heads=25"),
        ("swin_t", {"window_size": 0}, "window_size must be"),
        ("swin_t", {"window": 8}, "did you mean 'window_size'?"),
        ("swin_t", {"drop_path": 1.0}, "drop_path must be"),
        ("swin_t", {"image_size": (36, 50)}, "image size 36x50"),
        ("swin_t", {"position": "rope2d(k_rope=16)"}, "k_rope=16"),
        ("nat_mini", {"dilations": (2,)}, "dilations=(2,)"),
        ("nat_mini", {"position": "rpb+rope2d", "pad_compat": True}, "pad_compat=True"),
        ("nat_mini", {"kernel_size": 0}, "kernel_size must be"),
        ("nat_mini", {"convolutions": "none"}, "convolutions must be"),
        ("nat_mini", {"width": 65, "heads": (1, 1, 1, 1)}, "width=65"),
        (
            "vit_s16",
            {"image_size": 225},
            "image size 225x225 is not divisible by the patch size 16: crop or resize the images",
        ),
        (
            "vit_s16",
            {"image_size": (224, 100)},
            "image size 224x100 is not divisible by the patch size 16",
        ),
        (
            "vit_s16",
            {"image_size": 0},
            "image size 0 must be a positive number of pixels, 224, or a height and a width",
        ),
        ("vit_s16", {"image_size": (16, -16)}, "image size (16, -16) must be"),
        (
            "vit_s16",
            {"image_size": 224.0},
            "image size 224.0 must be a positive number of pixels, 224, or a height and a width",
        ),
        (
            "vit_s16",
            {"num_classes": -1},
            "num_classes must be a whole number of at least 0, not -1",
        ),
        (
            "vit_s16",
            {"num_classes": 10.5},
            "num_classes must be a whole number of at least 0, not 10.5",
        ),
        (
            "vit_s16",
            {"num_classes": "10"},
            "num_classes must be a whole number of at least 0, not '10'",
        ),
        (
            "vit_s16",
            {"dtype": jnp.int32},
            "dtype=int32 is not available; use float32, bfloat16 or float16",
        ),
        (
            "vit_s16",
            {"dtype": "float"},
            "dtype=float64 is not available; use float32, bfloat16 or float16, or float64 "
            "with jax_enable_x64",
        ),
        ("vit_s16", {"dtype": jnp.float64}, "dtype=float64 is not available"),
        ("vit_s16", {"dtype": "floaty"}, "dtype=floaty is not available"),
        ("vit_s16", {"dtype": jnp.float8_e4m3fn}, "dtype=float8_e4m3fn is not available"),
        (
            "vit_s16",
            {"position": 3},
            "position must be the text of a scheme",
        ),
        ("vit_s16", {"position": "rope4d"}, "unknown positional scheme 'rope4d'; the nearest"),
    ],
)
def test_impossible_models_are_refused_with_advice(name, options, advice):
    # As users have it: without the annotation checks of tests.
    create_model = inspect.unwrap(rope_jax.create_model)
    with pytest.raises(ValueError, match=re.escape(advice)):
        nnx.eval_shape(lambda: create_model(name, **options))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit_digits", (7, 10)),
        ("vit_lite_6_4", (12, 18)),
        ("swin_t", (38, 52)),
        ("nat_mini", (38, 52)),
        ("t2t_vit_7", (9, 2)),
        ("cat_5", (48, 64)),  # the paper's operator takes square maps
    ],
)
def test_calls_and_resize_refuse_wrong_sizes(name, size):
    model = abstract(name, image_size=8 if name == "vit_digits" else 64)
    for use in (lambda: abstract_call(model, *size), lambda: model.resize(size)):
        with pytest.raises(ValueError, match=f"{size[0]}x{size[1]}"):
            use()


OF_VIT = {"patch_size", "width", "depth", "heads", "mlp_ratio", "embed_class_token", "qkv_bias"}
OF_VIT |= {"norm_epsilon", "drop_path", "drop_path_schedule", "last_norm"}


@pytest.mark.parametrize(
    ("name", "more"), [("cct_7_3x1", {"class_token", "scan_layers", "remat"}), ("ceit_t", set())]
)
def test_vit_options_are_either_accepted_or_refused(name, more):
    accepted, refused = OF_VIT | more, {*find_model(name).options.fixed}
    assert accepted | refused == {field.name for field in dataclasses.fields(ViTOptions)}
    assert not accepted & refused


def test_options_are_checked_by_annotation_and_may_be_none():
    options = PostponedOptions().override("mine", {"scale": 1, "old": 2.0, "join": "add"})
    assert repr(options) == "PostponedOptions(scale=1.0, old=2.0, join='add', count=None)"
    assert options.override("mine", dict.fromkeys(("scale", "old", "join"))) == PostponedOptions()
    with pytest.raises(ValueError, match=r"mine: count .*, or None, not 0"):
        options.override("mine", {"count": 0})
