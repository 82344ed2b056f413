import jax
import numpy as np
import pytest
from flax import nnx

import rope_jax
from tests.models.small import compile_read, create_head, pictures

SMALL = {"width": 16, "heads": 2, "depth": 4, "image_size": 32, "patch_size": 8}


def test_cells_of_a_token_are_adjacent():
    """Cell (a, b) of a token at (y, x) becomes the prediction at (2 y + a, 2 x + b)."""
    head = create_head("linear", channels=[5], num_classes=3, cells=2)
    maps = jax.random.normal(jax.random.key(0), (2, 3, 4, 5))
    logits = head([maps]).logits
    assert logits.shape == (2, 6, 8, 3)
    cells = np.asarray(head.classify(maps)).reshape(2, 3, 4, 2, 2, 3)
    for a, b in np.ndindex(2, 2):
        np.testing.assert_array_equal(logits[:, a::2, b::2], cells[..., a, b, :])


def test_training_draws_dropout_and_moves_batch_statistics():
    model = rope_jax.create_model("deit_ti16", head="upernet(width=8)", num_classes=3, **SMALL)
    images = pictures(32, 32)
    with pytest.raises(ValueError, match=r"needs a key for .*dropout"):
        model.predict(images, train=True)
    predict = lambda model, images, key: (
        model.predict(images, train=True, key=key),
        nnx.state(model, nnx.BatchStat),
    )
    run = compile_read(model, predict)
    (first, stats), (second, _) = (run(images, jax.random.key(seed)) for seed in (1, 2))
    assert first.auxiliary.shape == (2, 4, 4, 3)
    assert first.auxiliary_weight == 0.4
    assert np.abs(first.logits - second.logits).max() > 1e-6
    before = nnx.state(model, nnx.BatchStat)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(stats), strict=True):
        assert not np.array_equal(old, new)
