"""Tiles of Triton's kernels that are worth measuring for a call, next to the planned ones.

Each function takes a flag for training (with gradients), and the arguments of a call by name, for
which shapes suffice.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from rope_jax_kernels.attention.plans import EXAMPLES, SMALLEST, Sizes, plan, plan_sizes
from rope_jax_kernels.attention.task import Launch, make_task
from rope_jax_kernels.dispatch import TileSizes, select_data
from rope_jax_kernels.rotary.kernel import angle_arrays
from rope_jax_kernels.rotary.tile_sizes import WARPS, plan_spread_tile

# From planned sizes of an attention kernel to others that are measured.
CHANGES: tuple[Callable[[Sizes], Sizes], ...] = (
    lambda x: x._replace(stages=3 - x.stages),
    lambda x: x._replace(warps=2 * x.warps),
    lambda x: x._replace(rows=max(SMALLEST, x.rows // 2)),
    lambda x: x._replace(columns=max(SMALLEST, x.columns // 2)),
    lambda x: x._replace(columns=2 * x.columns),
    lambda x: x._replace(each=1 if x.each > 1 else EXAMPLES),
)


def attention_tiles(training: bool, arguments: dict[str, Any]) -> list[TileSizes]:
    """Sizes near the planned ones, one part at a time, except those that change no program."""
    terms = {name: arguments[name] for name in ("pattern", "rotation", "bias", "scale")}
    arrays = tuple(select_data(arguments).values())
    task, itemsize, batch = make_task(arrays, **terms), arrays[0].dtype.itemsize, arrays[0].shape[0]
    tiles = {}

    def launches(parts: tuple[str, ...], tile: TileSizes) -> tuple[Launch, ...]:
        changed = dataclasses.replace(task, tile=tile)
        plans = (plan(changed, itemsize, part, batch) for part in parts)
        return tuple(dataclasses.replace(launch, task=task) for launch in plans)

    for parts in [("forward",), ("queries", "keys")] if training else [("forward",)]:
        for change in CHANGES:
            sizes = {part: change(plan_sizes(task, itemsize, part)) for part in parts}
            changed = launches(parts, tuple((part, tuple(x)) for part, x in sizes.items()))
            # Small patterns cut several sizes into the same tiles.
            if changed != launches(parts, ()):
                tile = tuple(  # named by the stages that it has
                    (part, tuple(x._replace(stages=launch.stages)))
                    for (part, x), launch in zip(sizes.items(), changed, strict=True)
                )
                tiles.setdefault(changed, tile)
    return list(tiles.values())


def rotation_tiles(training: bool, arguments: dict[str, Any]) -> list[TileSizes]:
    """(rows, items, steps, warps); the backward pass has the tile of the forward pass."""
    x = next(iter(select_data(arguments).values()))
    angles = angle_arrays(arguments.get("rotation"), arguments.get("theta"))
    pairs, head_dim = list(angles.values())[-1].shape[-1], x.shape[-1]
    pairing = arguments["pairing"] if "pairing" in arguments else arguments["rotation"].pairing
    count = math.prod(x.shape[1:-1]) // (3 if x.ndim == 5 else 1)
    tile = plan_spread_tile(x.shape[0], count, pairs, head_dim, x.dtype.itemsize, pairing)
    rows, items, steps = tile.rows, tile.items, tile.steps
    changed = (
        (2 * rows, items, steps, 2 * WARPS),
        (2 * rows, max(1, items // 2), steps, WARPS),
        (max(1, rows // 2), items, steps, WARPS),
        (rows, max(1, items // 2), 2 * steps, WARPS),
        (rows, items, 1, WARPS),
    )
    planned = (rows, items, steps, WARPS)
    return [(("rows", sizes),) for sizes in dict.fromkeys(changed) if sizes != planned]


# Module of an implementation, as in `dispatch.IMPLEMENTATIONS` -> the function for its operations.
OTHER_TILES = {"attention.triton": attention_tiles, "rotary.triton": rotation_tiles}
