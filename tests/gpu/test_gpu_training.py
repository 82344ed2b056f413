"""A training step of entire models by the default kernels, against "xla"."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax_kernels import Choices
from tests.gpu.programs import at

pytestmark = pytest.mark.gpu

# (model, position), at 224 pixels. Only the first is rehearsed, at another size.
MODELS = [
    ("vit_digits", "axial_rope"),
    ("deit3_s16", "rope_mixed"),
    ("deit3_s16", "axial_rope"),
    ("swin_t", "rpb"),
    ("swin_t", "axial_rope"),
    ("nat_mini", "axial_rope"),
]


def compute(name, position, dtype, choices):
    """The loss and the gradients, in float64."""
    size = 224 if name != "vit_digits" else 16
    model = rope_jax.create_model(name, position=position, image_size=size, dtype=jnp.dtype(dtype))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    images = np.random.default_rng(0).standard_normal((at(8, 2), size, size, 3))

    def loss(params, images):
        logits = nnx.merge(graph, params, rest)(images, train=False)
        return -jax.nn.log_softmax(logits.astype(jnp.float32))[:, 0].mean()

    with choices:
        value, gradients = jax.jit(jax.value_and_grad(loss))(params, np.float32(images))
    return float(value), [np.asarray(x, np.float64) for x in jax.tree.leaves(gradients)]


def distance(first, second):
    """The Euclidean distance over all parameters."""
    return sum(np.sum((x - y) ** 2) for x, y in zip(first, second, strict=True)) ** 0.5


@pytest.mark.parametrize(("name", "position"), MODELS[: at(None, 1)])
def test_default_kernels_are_as_exact_as_xla(name, position):
    kernels = Choices() if at(True, False) else Choices(everywhere="triton")
    with jax.default_matmul_precision("highest"):
        loss, exact = compute(name, position, "float32", Choices(everywhere="xla"))
    plain_loss, plain = compute(name, position, "bfloat16", Choices(everywhere="xla"))
    kernel_loss, kernel = compute(name, position, "bfloat16", kernels)
    assert distance(plain, exact) > 0
    # Twice that of "xla", as for the gradients of single calls.
    assert distance(kernel, exact) <= 2 * distance(plain, exact)
    assert abs(kernel_loss - loss) <= 2 * abs(plain_loss - loss) + 2 * 2**-8 * abs(loss)
