"""The programs of Triton's attention kernels: sizes of tiles, warps, stages, examples of each."""

import dataclasses
from typing import NamedTuple

from rope_jax_kernels import device
from rope_jax_kernels.attention.patterns import Global, Window
from rope_jax_kernels.attention.task import Launch, Task
from rope_jax_kernels.attention.tiles import cut

PROGRAMS = 1024  # the least, where a program could do more: several for each multiprocessor
SMALLEST = 16  # side of a tile, for the matrix instructions
EXAMPLES = 8  # of a program for windows


class Sizes(NamedTuple):
    """Sizes of a kernel's programs; arguments of `cut` and `Launch`."""

    rows: int
    columns: int
    warps: int
    stages: int = 1
    each: int = 1


def plan_sizes(task: Task, itemsize: int, part: str) -> Sizes:
    """Chooses the sizes for which the fewest instructions were counted.

    Counted for compute capability 9.0a, 8.9 and 8.0. Registers spill in the backward kernel of
    windows before Hopper, and in float32 with heads of 128. Arguments as in `plan`.
    """
    if itemsize == 4 or task.head_dim > 64:
        return _wide_sizes(task, itemsize, part)
    # On Ampere, Ada and consumer Blackwell (12.x, not compiled for yet), all operands of matrix
    # instructions are in registers.
    older = device.capability() // 10 in (8, 12)
    if part == "forward" and isinstance(task.pattern, Global):
        # Tall tiles turn keys fewer times.
        return Sizes(128, 32 if older or task.biased else 64, 4)
    if older and task.head_dim > 32 and part in ("queries", "keys"):
        return Sizes(32, 32, 4) if part == "keys" else Sizes(64, 16, 4)
    one_block = isinstance(task.pattern, Window) and task.pattern.rotated_tokens(task.places) <= 64
    if one_block and (part == "forward" or not older):
        # A window is one block. With a bias, its gradients leave wide heads no free registers.
        alone = part == "queries" and task.biased and task.head_dim > 32
        return Sizes(64, 64, 4) if alone else Sizes(64, 64, 4, 2, EXAMPLES)
    return Sizes(64, 32, 4)


def plan(task: Task, itemsize: int, part: str, batch: int) -> Launch:
    """A kernel's programs, of measured sizes or else planned ones.

    Closed patterns have one stage in the backward pass where there are several blocks of keys,
    whatever was measured: with two, Triton leaves the product for dq with the last piece of the
    keys in flight over the end of a round, and copies the next keys into the memory that it reads.

    Args:
        task: of the kernel.
        itemsize: bytes of a number of q, k and v.
        part: "forward", "queries", "keys" or "bias".
        batch: examples.
    """
    measured = dict(task.tile).get(part)
    sizes = Sizes(*measured) if measured else plan_sizes(task, itemsize, part)
    tiles = cut(task.pattern, task.places, rows=sizes.rows, columns=sizes.columns)
    launch = Launch(task, tiles, sizes.warps, sizes.stages)
    if part != "forward" and launch.closed and tiles.blocks > 1:
        launch = dataclasses.replace(launch, stages=1)
    several = part == "forward" or (part == "queries" and launch.closed)
    return with_examples(launch, batch, sizes.each) if several else launch


def with_examples(launch: Launch, batch: int, most: int) -> Launch:
    """A launch whose programs compute several examples each, as evenly as possible.

    Args:
        launch: to change.
        batch: examples.
        most: examples of a program; fewer where less than `PROGRAMS` programs would be left.
    """
    programs = launch.task.heads * launch.tiles.tiles * batch
    each = min(most, batch, max(1, programs // PROGRAMS))
    return dataclasses.replace(launch, each=-(-batch // -(-batch // each)))


def bias_groups(launch: Launch, items: int) -> int:
    """Groups of items that programs of a bias' gradient add up: about `PROGRAMS` programs in all.

    Args:
        launch: its tiles and blocks have one program each, except for repeated tiles.
        items: pairs of an example and a repeat of the tiles.
    """
    tiles = launch.tiles
    alone = launch.task.heads * (tiles.tiles // tiles.repeats) * tiles.blocks
    return min(items, max(1, PROGRAMS // alone))


def _wide_sizes(task: Task, itemsize: int, part: str) -> Sizes:
    """Sizes where a row of channels takes many registers."""
    everywhere = isinstance(task.pattern, Global)
    if part == "bias" or (part == "forward" and itemsize == 4 and task.head_dim > 32):
        return Sizes(32, 16, 8)
    if part == "forward":
        return Sizes(64, 32, 4)
    if itemsize == 4 and not everywhere:
        return Sizes(16 if part == "keys" else 32, 16, 16)
    return Sizes(16, 16, 4 if itemsize == 4 else 8) if part == "keys" else Sizes(32, 16, 8)
