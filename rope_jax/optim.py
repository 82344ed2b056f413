"""The optimiser: AdamW with warmup and cosine decay, gradient clipping, and no decay where none belongs."""

from typing import Any

import jax
import optax
from flax import nnx


def learning_rate_schedule(*, peak: float, end: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """Linear from 0 to `peak` over `warmup_steps`, then a cosine to `end` at `total_steps`."""
    warmup_steps = min(warmup_steps, max(total_steps - 1, 0))
    return optax.warmup_cosine_decay_schedule(0.0 if warmup_steps else peak, peak, warmup_steps, max(total_steps, 1), end)


def decay_mask(params: nnx.State) -> Any:
    """Which parameters are decayed, as a pure dict of booleans.

    A parameter says it itself (`nnx.Param(value, decay=False)`: positional schemes and class tokens do); others are decayed when they
    are matrices or kernels, that is, when they have more than one axis, the layers of a stack (`layers=True`) not counted.
    """
    is_param = lambda leaf: isinstance(leaf, nnx.Variable)

    def decays(leaf: nnx.Variable) -> nnx.Variable:
        says = leaf.get_metadata()
        return leaf.replace(bool(says.get("decay", len(leaf.shape) - says.get("layers", False) > 1)))

    return nnx.to_pure_dict(jax.tree.map(decays, params, is_leaf=is_param))


def adamw(
    schedule: optax.Schedule, *, mask: Any, weight_decay: float, b1: float, b2: float, eps: float, clip_norm: float | None
) -> optax.GradientTransformation:
    """AdamW (decoupled decay, times the learning rate) behind clipping by the global norm."""
    optimizer = optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask)
    return optimizer if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
