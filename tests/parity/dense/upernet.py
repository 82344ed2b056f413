"""UperNet on fixed maps, on BEiT-2's backbone, and on mmsegmentation's ViT with any neck."""

import numpy as np

import rope_jax
from tests.models.small import compile_call, compile_read, create_head
from tests.parity.dense import draw_maps, images, load


def make_model(case, weights, dtype):
    """The model of a case, or the head alone, without weights."""
    auxiliary, common = case["auxiliary"], {"num_classes": case["classes"]}
    options = {"width": case["width"], "auxiliary_width": auxiliary["width"]}
    options |= {"auxiliary_map": auxiliary["map"]}
    if "maps" in case:
        return create_head("upernet", case["channels"], dtype=dtype, **common, **options)
    options |= {"neck": case["neck"]} if "neck" in case else {}
    names = ("depth", "heads", "layer_scale", "norm_epsilon", "last_norm")
    return rope_jax.create_model(
        "beit_b16" if "layer_scale" in case else "deit_b16",
        head=f"upernet({','.join(f'{name}={value}' for name, value in options.items())})",
        blocks=tuple(case["blocks"]),
        image_size=tuple(case.get("created_for", case["image"])),
        width=case["embed_dim"],
        dtype=dtype,
        **common,
        **{name: case[name] for name in names if name in case},
    )


def read(model, x, _):
    maps = model.head_maps(x)
    predictions = model.head(maps)
    full_size = model.head.result(predictions, x.shape[1:3])
    return maps, predictions.logits, full_size, predictions.auxiliary


def outputs(golden, dtype):
    case, model = golden.case, load(golden, dtype, "mmseg")
    if "maps" in case:
        predictions = compile_call(model)(draw_maps(case, dtype))
        stored = {"logits": predictions.logits, "aux_logits": predictions.auxiliary}
    else:
        x = images(*case["image"]).astype(dtype)
        maps, logits, full_size, auxiliary = compile_read(model, read)(x)
        step = 2 if "layer_scale" in case else 1
        stored = {f"map{i}": x[:, ::step, ::step, :8] for i, x in enumerate(maps)}
        stored |= {"logits": logits, "aux_logits": auxiliary}
        stored["logits_at_image_size"] = full_size[:, ::4, ::4, ::7]
    stored["logits"] = stored["logits"][..., ::3]
    return {name: np.asarray(x).transpose(0, 3, 1, 2) for name, x in stored.items()}
