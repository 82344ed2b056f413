"""Mask2Former's decoders on fixed maps, and its semantic scores."""

from rope_jax.models.heads.mask2former.head import semantic_scores
from tests.models.small import compile_read, create_head
from tests.parity.dense import draw_maps, load

LIMITS = {"float64": 2e-5}  # the official positions are float32


def make_model(case, weights, dtype):
    """The head of a case, without weights."""
    options = {
        "width": case["width"],
        "heads": case["heads"],
        "pixel_depth": case["encoder"],
        "pixel_hidden": case["hidden"],
        # Layers after the first predictions; the case counts one less.
        "depth": sum(name.endswith("multihead_attn.in_proj_bias") for name in weights),
        "hidden": len(weights["predictor.transformer_ffn_layers.0.linear1.bias"]),
        "queries": case["queries"],
    }
    return create_head(
        "mask2former",
        channels=case["channels"],
        num_classes=case["classes"],
        dtype=dtype,
        **options,
    )


def outputs(golden, dtype):
    head, maps = load(golden, dtype, "mask2former"), draw_maps(golden.case, dtype)

    def read(head, maps, _):
        results = head(maps)
        classes, masks = results.classes[-1], results.masks()
        return {
            "mask_features": results.pixels[:, ::2, ::2, ::8],
            "pred_masks": masks[:, ::3, ::4],
            "first_masks": results.masks(0)[:, ::3, ::4],
            "semantic": semantic_scores(classes, masks)[:, ::3, ::4],
        }, classes

    results, classes = compile_read(head, read)(maps)
    return {key: x.transpose(0, 3, 1, 2) for key, x in results.items()} | {"pred_logits": classes}
