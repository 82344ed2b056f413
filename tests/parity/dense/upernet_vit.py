"""mmsegmentation's ViT with UperNet: with its neck, with a last norm, and without a neck."""

from flax import nnx

import rope_jax
from tests.parity.dense import images
from tests.parity.dense.upernet_beit import run


def make_model(case, weights, dtype):
    """The model of a case, without weights."""
    auxiliary = case["auxiliary"]
    options = {
        "width": case["width"],
        "auxiliary_width": auxiliary["width"],
        "auxiliary_map": auxiliary["map"],
        "neck": case["neck"],
    }
    return rope_jax.create_model(
        "deit_b16",
        head=f"upernet({','.join(f'{name}={value}' for name, value in options.items())})",
        num_classes=case["classes"],
        blocks=tuple(case["blocks"]),
        image_size=tuple(case["created_for"]),
        dtype=dtype,
        width=case["embed_dim"],
        depth=case["depth"],
        heads=case["heads"],
        norm_epsilon=case["norm_epsilon"],
        last_norm=case["last_norm"],
    )


def outputs(golden, dtype):
    case = golden.case
    model = nnx.eval_shape(lambda: make_model(case, golden.weights, dtype))
    rope_jax.convert_state_dict(model, golden.weights, source="mmseg")
    maps, logits, full_size, auxiliary = run(model, images(*case["image"]).astype(dtype))
    return {f"map{i}": x[:, :8] for i, x in enumerate(maps)} | {
        "logits": logits[:, ::3],
        "logits_at_image_size": full_size[:, ::7, ::4, ::4],
        "aux_logits": auxiliary,
    }
