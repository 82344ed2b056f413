"""ViTDet's backbone and simple feature pyramid."""

import jax.numpy as jnp
from flax import nnx

import rope_jax
from rope_jax.models.pyramid import FeaturePyramid, PyramidBackbone
from tests.models.small import compile_read
from tests.parity.dense import images, load


def make_model(case, weights, dtype):
    """The model of a case, without weights."""
    depth, patch = case["depth"], weights["net.patch_embed.proj.weight"].shape[-1]
    global_blocks = tuple(sorted({*range(depth)} - {*case["windowed_blocks"]}))
    position = "ape"
    if case["relative"]:
        # Global blocks have tables of the size of creation, which is not that of the positions.
        far = [len(weights[f"net.blocks.{i}.attn.rel_pos_h"]) for i in global_blocks]
        position += f"+decomposed(side={(far[0] + 1) // 2})" if far else "+decomposed"
    vit = rope_jax.create_model(
        "deit_ti16",
        position=position,
        patch_size=patch,
        width=case["embed_dim"],
        depth=depth,
        heads=case["heads"],
        mlp_ratio=weights["net.blocks.0.mlp.fc1.bias"].size / case["embed_dim"],
        image_size=case["pretrained_for"],
        class_token=False,
        attention="window",
        window_size=case["window"],
        window_padding="tokens",
        global_blocks=global_blocks,
        last_norm=False,
        num_classes=0,
        dtype=dtype,
    )
    pyramid = FeaturePyramid(
        case["embed_dim"], outputs=case["channels"], dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)
    )
    return PyramidBackbone(vit, pyramid)


def outputs(golden, dtype):
    model = load(golden, dtype, "detectron2")

    def read(model, x, _):
        (last,) = model.backbone.features(x, norm=False)
        return last, model.neck([last])

    last, maps = compile_read(model, read)(jnp.asarray(images(*golden.case["image"]), dtype))
    stored = {f"p{n}": x[:, ::2, ::2, :8] for n, x in enumerate(maps, 2)}
    stored["last_feat"] = last[..., :16]
    return {key: x.transpose(0, 3, 1, 2) for key, x in stored.items()}
