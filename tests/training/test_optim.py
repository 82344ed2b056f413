import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.checkpoint import named_leaves
from rope_jax.optim import adamw, decay_mask, learning_rate_schedule


def test_schedule():
    schedule = learning_rate_schedule(peak=1.0, end=0.1, warmup_steps=10, total_steps=110)
    assert [float(schedule(s)) for s in (0, 5, 10)] == [0.0, 0.5, 1.0]
    assert float(schedule(60)) == pytest.approx((1.0 + 0.1) / 2)
    assert float(schedule(110)) == pytest.approx(0.1)
    assert float(learning_rate_schedule(peak=1.0, end=0.1, warmup_steps=0, total_steps=10)(0)) == 1.0


@pytest.mark.parametrize("model", ["deit_ti16", "deit3_ti16", "vit_digits"])
@pytest.mark.parametrize("position", ["ape", "rpb", "rope_mixed", "lape(ape)", "rope_mixed+ape"])
def test_only_matrices_are_decayed_and_schemes_are_exempt(model, position):
    params = nnx.state(nnx.eval_shape(lambda: rope_jax.create_model(model, position=position, depth=1)), nnx.Param)
    mask = dict(named_leaves(decay_mask(params)))
    decayed = {name for name, decay in mask.items() if decay}
    assert decayed == {name for name in mask if name.endswith(".kernel")}
    assert any(name.startswith("position.") for name in mask)


def test_decay_and_clipping():
    params = {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.full((2,), 2.0)}
    options = {"mask": {"kernel": True, "bias": False}, "b1": 0.9, "b2": 0.999, "eps": 1e-8}
    zero = jax.tree.map(jnp.zeros_like, params)
    still = adamw(lambda step: 0.1, weight_decay=0.5, clip_norm=None, **options)
    updates, _ = still.update(zero, still.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.1 * 0.5 * 2.0, rtol=1e-6)  # decoupled: learning rate times decay times value
    np.testing.assert_array_equal(updates["bias"], 0.0)
    # Adam's first step is the sign of the gradient whatever its size; clipping shows in the moments.
    clipped = adamw(lambda step: 0.1, weight_decay=0.0, clip_norm=1.0, **options)
    _, after = clipped.update(jax.tree.map(lambda p: p * 100, params), clipped.init(params), params)
    moments = [leaf for name, leaf in named_leaves(after) if ".mu." in f".{name}."]
    np.testing.assert_allclose(np.sqrt(sum((m / 0.1) ** 2 for leaf in moments for m in np.ravel(leaf))), 1.0, rtol=1e-5)
