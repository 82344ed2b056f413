"""The optimizers and learning rates of the recipes, composed from optax."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.config import ConfigError, OptimConfig
from rope_jax.system.files import warn

Whole = Callable[[tuple[int, ...]], bool]


def in_epochs(options: OptimConfig, steps_per_epoch: float | None) -> OptimConfig:
    """The options with milestones in epochs, given in steps unless `steps_per_epoch` is None."""
    if steps_per_epoch is None:
        return options
    milestones = tuple(step / steps_per_epoch for step in options.milestones)
    return dataclasses.replace(options, milestones=milestones)


def learning_rate_schedule(
    options: OptimConfig, *, epochs: float, steps_per_epoch: float
) -> optax.Schedule:
    """Linear warmup, then one of the config's curves, then cooldown at the minimum.

    Where warmup and cooldown leave nothing between them, each that is not 0 becomes a tenth of the
    run, in whole steps or epochs and at least one, with a warning.

    Args:
        options: of the config, with milestones in epochs.
        epochs: of the whole run, cooldown included.
        steps_per_epoch: a fraction if batches cross the ends of epochs.
    """
    if options.warmup_steps is not None:
        warmup_epochs = options.warmup_steps / steps_per_epoch
        options = dataclasses.replace(options, warmup_epochs=warmup_epochs)
    warmup, cooldown = options.warmup_epochs, options.cooldown_epochs
    if warmup + cooldown >= epochs:
        per_epoch = steps_per_epoch if options.schedule_step == "iteration" else 1
        tenth = max(1, round(epochs * per_epoch / 10)) / per_epoch
        options = dataclasses.replace(
            options, warmup_epochs=warmup and tenth, cooldown_epochs=cooldown and tenth
        )
        warn(
            f"WARNING: {warmup:.4g} epochs of warmup and {cooldown:.4g} of cooldown do not fit "
            f"into a run of {epochs:.4g}: they are shortened to {options.warmup_epochs:.4g} and "
            f"{options.cooldown_epochs:.4g}"
        )
    if options.milestones and options.schedule != "step":
        warn(
            f"WARNING: milestones={options.milestones} have no effect with "
            f"schedule={options.schedule}"
        )
    if options.schedule == "step" and not options.milestones:
        raise ValueError("schedule='step' needs milestones: give the epochs or steps of its drops")
    if options.schedule_step == "iteration":
        total = max(1, round((epochs - options.cooldown_epochs) * steps_per_epoch))
        milestones = tuple(float(round(epoch * steps_per_epoch)) for epoch in options.milestones)
        options = dataclasses.replace(options, milestones=milestones)
        return _curve(
            options, min(round(options.warmup_epochs * steps_per_epoch), total - 1), total
        )
    late = options.schedule_step == "late_epoch"
    total = epochs - options.cooldown_epochs
    curve = _curve(options, min(options.warmup_epochs, max(np.ceil(total) - 1 - late, 0)), total)
    # The first step of each epoch, in whole numbers: a quotient in float32 could miss the border.
    starts = np.ceil(np.arange(1, int(np.ceil(epochs)) + 1) * steps_per_epoch - 1e-6).astype(
        np.int32
    )

    def by_epoch(step: Any) -> jax.Array:
        epoch = jnp.searchsorted(jnp.asarray(starts), step, side="right")
        return curve(jnp.maximum(epoch - 1, 0) if late else epoch)

    return by_epoch


def _curve(options: OptimConfig, warmup: int | float, total: int | float) -> optax.Schedule:
    """The learning rate over steps or epochs; cosine and poly end at `total`."""
    if options.schedule in ("poly", "step"):
        return _times_warmup(options, warmup, total)
    peak, end = options.learning_rate, options.min_learning_rate
    start = warmup if options.warmup_prefix else 0  # of the cosine

    def after(time: Any) -> Any:  # `join_schedules` counts from the end of the warmup
        return main(time + (warmup - start))

    if options.schedule == "constant":
        main = optax.constant_schedule(peak)
    elif total > start:
        main = optax.cosine_decay_schedule(peak, total - start, end / peak if peak else 0.0)
    else:
        main = optax.constant_schedule(end)
    if not warmup:
        return after
    low = options.warmup_learning_rate

    def before(time: Any) -> Any:  # from `low` up, so that float32 keeps its digits
        return low + (peak - low) * jnp.asarray(time, jnp.float32) / warmup

    return optax.join_schedules([before, after], [warmup])


def _times_warmup(options: OptimConfig, warmup: int | float, total: int | float) -> optax.Schedule:
    """poly: a power of the remaining fraction of the run; step: a tenth after each milestone.

    Both are multiplied by a factor that rises linearly to 1 in the warmup.
    """
    peak, end = options.learning_rate, options.min_learning_rate
    low = options.warmup_learning_rate / peak if peak else 0.0
    milestones = np.asarray(options.milestones, np.float32)

    def rate(time: Any) -> Any:
        time = jnp.asarray(time, jnp.float32)
        if options.schedule == "poly":
            value = end + (peak - end) * jnp.clip((total - time) / total, 0, 1) ** options.power
        else:
            value = peak * 0.1 ** (time >= milestones).sum()
        return value * (low + (1 - low) * jnp.minimum(time / warmup, 1)) if warmup else value

    return rate


def decay_mask(params: nnx.State, exempt: str = "declared") -> Any:
    """Mask of the parameters that are decayed, as a pure dict of booleans.

    Args:
        params: of a model.
        exempt: parameters without decay. "declared": biases, norms, and those that models and
            schemes declare (`nnx.Param(value, decay=False)`: positions, class tokens); "norms": as
            "declared", except for the biases of layers, as in detectron2; "vectors": biases and
            norms only, parameters with one axis or none, not counting that of layers; "nothing":
            everything is decayed.
    """
    norms = {path[:-1] for path, _ in nnx.to_flat_state(params) if path[-1] == "scale"}

    def decays(path: tuple, leaf: nnx.Variable) -> bool:
        matrix = len(leaf.shape) - _is_stack(leaf) > 1
        declared = leaf.get_metadata().get("decay")
        return {
            "declared": matrix if declared is None else declared,
            "norms": path[:-1] not in norms if declared is None else declared,
            "vectors": matrix,
            "nothing": True,
        }[exempt]

    return _map_params(decays, params)


def layer_stacks(params: nnx.State) -> Any:
    """Mask of the parameters with a leading axis of layers, as a pure dict of booleans."""
    return _map_params(lambda path, leaf: _is_stack(leaf), params)


def _is_stack(leaf: nnx.Variable) -> bool:
    """Checks whether a parameter declares that its first axis is that of layers."""
    return leaf.get_metadata().get("layers", False)


def _map_params(function: Callable[[tuple, nnx.Variable], Any], params: nnx.State) -> Any:
    flat = nnx.to_flat_state(params)
    return nnx.to_pure_dict(
        nnx.from_flat_state([(path, leaf.replace(function(path, leaf))) for path, leaf in flat])
    )


def layer_rates(params: nnx.State, layer_decay: float, last_norm: str = "head") -> Any:
    """Factors on the learning rate of each parameter for layer-wise decay.

    The factor is 1 for the head, `layer_decay` for the last block, its square for the block below,
    and so on, by the depth that parameters declare (see `rope_jax.models.backbone`). Those without
    a depth count with the head, as do neck and head of a dense model.

    Args:
        params: of a model.
        layer_decay: the factor from each block to the one below.
        last_norm: "head" gives the norm after the last block the factor of the head, as the codes
            of BEiT and MAE do; "block" that of the last block, as timm's `param_groups_layer_decay`
            does with `norm`. timm's `fc_norm` (BEiT with mean pooling) has that of the head.

    Returns:
        A pure dict of factors: numbers, or arrays that broadcast over all axes but the layers'.
    """
    depths = {}
    for path, leaf in nnx.to_flat_state(params):
        declared = leaf.get_metadata()
        depth, is_norm = declared.get("depth"), declared.get("last_norm", False)
        if depth is None or (is_norm and last_norm == "head"):
            continue
        if _is_stack(leaf):
            numbers = depth + np.arange(leaf.shape[0], dtype=np.float32)
            depth = numbers.reshape(-1, *(1,) * (len(leaf.shape) - 1))
        depths[path] = depth
    if not depths:
        raise ConfigError(
            f"--config.optim.layer_decay={layer_decay} needs a model whose parameters declare "
            "their depth, see rope_jax.models.blocks.make_blocks; this one's do not: set it to 1"
        )
    top = 1 + max(int(np.max(depth)) for depth in depths.values())
    return _map_params(lambda path, leaf: layer_decay ** (top - depths.get(path, top)), params)


def backbone_rates(params: nnx.State, factor: float) -> Any:
    """Factors on the learning rate of a dense model: 1 for its head, `factor` for everything else.

    The norms or the pyramid that make the head's maps are part of the backbone in official codes.
    Models without a head of dense prediction have the factor 1.
    """
    return _map_params(
        lambda path, leaf: factor if path[0] in ("backbone", "neck") else 1.0, params
    )


def make_optimizer(
    options: OptimConfig,
    schedule: optax.Schedule,
    params: nnx.State,
    whole: Whole = lambda shape: True,
) -> optax.GradientTransformation:
    """The optimizer of a model's parameters.

    - "adamw": decoupled decay, times the learning rate (arXiv 1711.05101).
    - "lamb": AdamW's step scaled per tensor by |parameters| / |step| (arXiv 1904.00962), as
      DeiT-III uses Apex's FusedLAMB: not for tensors without decay; per layer in a stack of layers.
    - "sgd": with momentum; decay is part of the gradient, as in PyTorch.

    Gradients are first clipped by their global norm; updates are multiplied by `layer_rates` and
    `backbone_rates`.

    Args:
        options: of the config.
        schedule: of the learning rate.
        params: of the model; their metadata declare decay and layer stacks.
        whole: see `global_norm`.
    """
    mask, o = decay_mask(params, options.exempt), options
    if o.name == "adamw":
        parts = [
            optax.adamw(
                schedule, b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, mask=mask
            )
        ]
    elif o.name == "lamb":
        decay = optax.add_decayed_weights(o.weight_decay, mask)
        trust = [scale_by_trust_ratio(mask, layer_stacks(params))] if o.weight_decay else []
        parts = [
            optax.scale_by_adam(b1=o.b1, b2=o.b2, eps=o.eps),
            decay,
            *trust,
            optax.scale_by_learning_rate(schedule),
        ]
    else:
        parts = [
            optax.add_decayed_weights(o.weight_decay, mask),
            optax.sgd(schedule, momentum=o.momentum, nesterov=o.nesterov),
        ]
    if o.clip_norm is not None:
        parts = [clip_by_global_norm(o.clip_norm, whole), *parts]
    if o.layer_decay != 1:
        parts.append(_scale(layer_rates(params, o.layer_decay, o.last_norm)))
    if o.backbone_rate != 1:
        rates = backbone_rates(params, o.backbone_rate)
        if o.backbone_rate not in jax.tree.leaves(rates):
            warn(f"WARNING: backbone_rate={o.backbone_rate} has no effect without a head")
        parts.append(_scale(rates))
    return parts[0] if len(parts) == 1 else optax.chain(*parts)


def _scale(rates: Any) -> optax.GradientTransformation:
    """Multiplies updates by a factor for each parameter."""
    return optax.stateless(
        lambda updates, _: jax.tree.map(lambda u, rate: u * rate, updates, rates)
    )


def global_norm(tree: Any, whole: Whole = lambda shape: True) -> Float[Array, ""]:
    """The Euclidean norm of all arrays of a tree, computed from few long arrays.

    Args:
        tree: of arrays, for example gradients.
        whole: checks that every device holds all of an array of this shape. Other arrays are summed
            separately, because joining them would gather them.
    """
    leaves = jax.tree.leaves(tree)
    alone = [x for x in leaves if not whole(x.shape)]
    arrays = [*map(_join, _groups(leaves, whole)), *alone]
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in arrays))


def _groups(leaves: Sequence[Array], whole: Whole) -> list[tuple[Array, ...]]:
    """The arrays that can be joined, at most a hundred in a group.

    XLA copies the operands of a longer concatenation a second time.
    """
    return list(itertools.batched((x for x in leaves if whole(x.shape)), 100))


def _join(group: Sequence[Array]) -> Float[Array, " n"]:
    """One array. The barrier stops XLA from fusing the concatenation into each of its uses."""
    return jax.lax.optimization_barrier(jnp.concatenate([x.ravel() for x in group]))


def clip_by_global_norm(
    limit: float, whole: Whole = lambda shape: True
) -> optax.GradientTransformation:
    """Scales gradients down to `global_norm(gradients) <= limit`, as `optax.clip_by_global_norm`.

    The results are parts of few long arrays. XLA then updates ten parameters of equal shape in one
    launch, where separate arrays need one launch each and two more for the norm.
    """

    def clip(gradients: Any, _: Any) -> Any:
        norm = global_norm(gradients, whole)

        def clipped(x: Array) -> Array:
            return jnp.where(norm < limit, x, x / norm * limit)

        leaves, structure = jax.tree.flatten(gradients)
        parts: list[Array] = []
        for group in _groups(leaves, whole):
            ends = np.cumsum([x.size for x in group])
            parts += jnp.split(clipped(_join(group)), ends[:-1])
        joined = iter(parts)
        return structure.unflatten(
            [next(joined).reshape(x.shape) if whole(x.shape) else clipped(x) for x in leaves]
        )

    return optax.stateless(clip)


def scale_by_trust_ratio(mask: Any, layered: Any) -> optax.GradientTransformation:
    """LAMB's ratio |parameter| / |update| per masked tensor, per layer if layered; 1 for norm 0."""

    def scale(update: jax.Array, param: jax.Array, decayed: bool, layered: bool) -> jax.Array:
        if not decayed:
            return update
        norm = lambda x: jnp.sqrt(
            jnp.sum(jnp.square(x), axis=tuple(range(int(layered), x.ndim)), keepdims=True)
        )
        of_param, of_update = norm(param), norm(update)
        usable = (of_param > 0) & (of_update > 0)
        return update * jnp.where(usable, of_param / jnp.where(usable, of_update, 1), 1)

    return optax.stateless(
        lambda updates, params: jax.tree.map(scale, updates, params, mask, layered)
    )
