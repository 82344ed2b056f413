"""BEiT with UperNet, against BEiT-2's backbone and mmsegmentation's heads."""

import jax
from flax import nnx

import rope_jax
from tests.parity.dense import images


def outputs(golden, dtype):
    case, auxiliary = golden.case, golden.case["auxiliary"]

    def make():
        return rope_jax.create_model(
            "beit_b16",
            head=f"upernet(width={case['width']},auxiliary_width={auxiliary['width']},"
            f"auxiliary_map={auxiliary['map']})",
            num_classes=case["classes"],
            blocks=tuple(case["blocks"]),
            image_size=tuple(case["image"]),
            dtype=dtype,
            width=case["embed_dim"],
            depth=case["depth"],
            heads=case["heads"],
            layer_scale=case["layer_scale"],
        )

    model = nnx.eval_shape(make)
    rope_jax.convert_state_dict(model, golden.weights, source="mmseg")
    maps, logits, full_size, auxiliary = run(model, images(*case["image"]).astype(dtype))
    stored = {f"map{i}": x[:, :8, ::2, ::2] for i, x in enumerate(maps)}
    return stored | {
        "logits": logits[:, ::3],
        "logits_at_image_size": full_size[:, ::7, ::4, ::4],
        "aux_logits": auxiliary,
    }


def run(model, x):
    """Maps after the neck, logits, logits at the image's size, and logits of the second head.

    All are NCHW.
    """
    graph, state = nnx.split(model)

    @jax.jit
    def apply(state, x):
        model = nnx.merge(graph, state)
        maps = model.head_maps(x)
        predictions = model.head(maps)
        full_size = model.head.result(predictions, x.shape[1:3])
        outputs = (maps, predictions.logits, full_size, predictions.auxiliary)
        return jax.tree.map(lambda x: x.transpose(0, 3, 1, 2), outputs)

    return apply(state, x)
