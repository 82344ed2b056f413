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
            head=f"upernet(width={case['width']},auxiliary_width={auxiliary['width']})",
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
    assert model.head.auxiliary_map == auxiliary["map"]
    rope_jax.convert_state_dict(model, golden.weights, source="mmseg")
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, x):
        model = nnx.merge(graph, state)
        maps = model.head_maps(x)
        predictions = model.head(maps)
        return maps, predictions, model.head.result(predictions, x.shape[1:3])

    found = run(state, images(*case["image"]).astype(dtype))
    maps, predictions, whole = found
    first = lambda x: x.transpose(0, 3, 1, 2)  # channels first, as stored
    stored = {f"map{i}": first(x)[:, :8, ::2, ::2] for i, x in enumerate(maps)}
    return stored | {
        "logits": first(predictions.logits)[:, ::3],
        "logits_at_image_size": first(whole)[:, ::7, ::4, ::4],
        "aux_logits": first(predictions.auxiliary),
    }
