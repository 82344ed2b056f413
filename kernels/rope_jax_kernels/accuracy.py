"""The allowed error of a kernel: one rule for the tests and for the tuner."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def error(got: Any, exact: Any) -> float:
    """Largest deviation, relative to the largest element of the exact result, or to 1 if larger.

    >>> error(np.array([1.0, 4.5]), np.array([1.0, 4.0]))
    0.125
    """
    got, exact = (np.asarray(x, np.float64) for x in (got, exact))
    return float(np.abs(got - exact).max() / max(np.abs(exact).max(), 1))


def allowed_error(plain: float, dtype: Any, *, gradient: bool) -> float:
    """The largest error of a kernel that is allowed: that of "xla" and two roundings more.

    For a gradient twice that of "xla", because kernels recompute what autodiff stores.

    Args:
        plain: error of "xla" in the same dtype on the same operands.
        dtype: of the data.
        gradient: whether it is the error of a gradient.
    """
    return (2 if gradient else 1) * plain + 2 * float(jnp.finfo(dtype).eps)
