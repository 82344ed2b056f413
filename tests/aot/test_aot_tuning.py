"""The loops that `tune` times, as programs for Hopper, have only the call in their bodies."""

import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks._model_shapes import LAYERS
from rope_jax_kernels import Choices, Rotation, attention_qkv, record, rotate
from rope_jax_kernels.tuning.choices import Choice
from rope_jax_kernels.tuning.measure import Problem


def attend(layer, qkv, coords, freqs):
    rotation = Rotation(coords, freqs)
    return attention_qkv(qkv, pattern=layer.pattern, rotation=rotation).astype(jnp.float32).sum()


def rotate_and_sum(layer, qkv, coords, freqs):
    q, k, _ = jnp.moveaxis(qkv, 2, 0)
    return sum(x.astype(jnp.float32).sum() for x in rotate(q, k, Rotation(coords, freqs)))


@pytest.mark.parametrize(
    ("f", "name", "implementation", "training"),
    [
        (rotate_and_sum, "vit_s", "triton", False),
        (rotate_and_sum, "vit_s", "triton", True),
        (attend, "vit_s", "cudnn", False),
        (attend, "vit_s", "triton", True),
        (attend, "swin_t_1", "triton", True),
    ],
)
def test_the_body_of_a_loop_has_no_copies(gpus, compile_for, f, name, implementation, training):
    layer = LAYERS[name]
    *shapes, _, _ = layer.shapes(batch=16).values()
    loss = lambda *operands: f(layer, *operands)
    mesh = jax.sharding.Mesh(gpus[:1], ("d",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), record() as calls:
        jax.eval_shape(jax.grad(loss) if training else loss, *shapes)
    problem = Problem(*calls)

    def loop(*arguments):
        with Choices():
            return problem.loop(Choice(implementation), *arguments)

    count = jax.ShapeDtypeStruct((), jnp.int32)
    program = compile_for((1, 1), loop, *problem.shapes, count)
    (body,) = re.findall(r"body=%?([\w.]+)", program.text)
    text = re.search(rf"\n%?{re.escape(body)} .*?\n}}", program.text, re.S)[0]
    assert "custom-call(" in text
    copied = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", text)
    assert [shape for shape in copied if shape] == []
