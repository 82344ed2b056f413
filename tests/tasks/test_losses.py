import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import log_sigmoid

from rope_jax.tasks import classification as losses

LOGITS = jnp.array([[2.0, -1.0, 0.5], [0.0, 0.0, 3.0]])
FIRST, SECOND = jnp.array([0, 2]), jnp.array([1, 2])


def test_targets_of_a_mixture():
    """timm's: smoothing spreads 0.3 over three classes, 0.1 each; the remainder is divided."""
    targets = losses.soft_targets(FIRST, SECOND, 0.75, 3, 0.3)
    np.testing.assert_allclose(
        targets, [[0.75 * 0.7 + 0.1, 0.25 * 0.7 + 0.1, 0.1], [0.1, 0.1, 0.8]], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("share", "first_present"), [(0.9, [1, 1, 0]), (1.0, [1, 0, 0]), (0.0, [0, 1, 0])]
)
def test_the_binary_loss_uses_every_present_class(share, first_present):
    targets = losses.soft_targets(FIRST, SECOND, share, 3, 0.0)
    present = np.asarray([first_present, [0, 0, 1]])
    expected = -(
        present * log_sigmoid(LOGITS) + (1 - present) * log_sigmoid(-LOGITS)
    ).mean()  # over classes and examples
    assert float(losses.binary_loss(LOGITS, targets)) == pytest.approx(float(expected), rel=1e-6)
