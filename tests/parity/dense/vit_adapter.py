"""ViT-Adapter's backbone, in the form of its detection code."""

import jax.numpy as jnp

import rope_jax
from tests.models.small import compile_read
from tests.parity.dense import images, load

LIMITS = {"float64": 2e-5}  # the official code makes the references in float32


def make_model(case, weights, dtype):
    """The model of a case, without weights."""
    depth = case["depth"]
    side = round((weights["pos_embed"].shape[1] - 1) ** 0.5)
    values = weights["interactions.0.injector.attn.value_proj.bias"].size
    return rope_jax.create_model(
        "vit_adapter_ti16",
        width=case["embed_dim"],
        depth=depth,
        heads=case["heads"],
        mlp_ratio=weights["blocks.0.mlp.fc1.bias"].size / case["embed_dim"],
        image_size=16 * side,
        attention="window",
        window_size=case["window"],
        window_padding="qkv",
        global_blocks=tuple(sorted({*range(depth)} - {*case["windowed_blocks"]})),
        groups=tuple(blocks[-1] for blocks in case["interactions"]),
        prior_width=case["conv_inplane"],
        deform_heads=case["deform_heads"],
        deform_points=case["points"],
        deform_ratio=values / case["embed_dim"],
        adapter_ratio=float(case["cffn_ratio"]),
        added="last",
        num_classes=0,
        dtype=dtype,
    )


def outputs(golden, dtype):
    model = load(golden, dtype, "vit_adapter")
    run = compile_read(model, lambda model, x, _: model.features(x))
    maps = run(jnp.asarray(images(*golden.case["image"]), dtype))
    return {f"f{n}": x[:, ::2, ::2, :8].transpose(0, 3, 1, 2) for n, x in enumerate(maps, 1)}
