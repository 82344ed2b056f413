"""Slots of tokens, and the tiles and blocks of them that a pattern has.

A program of a kernel owns a tile, a power of two of slots that hold one token or none, and loops
over the blocks of keys that the tile's queries attend to. The token of a slot follows from its
index, so rolled windows, residue classes and halos are read directly from the map: nothing is
partitioned, rolled, padded or gathered in memory.

Backward passes also need tiles of keys with blocks of queries: `transpose()`.
"""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rope_jax_kernels.arithmetic import power_of_two

# Slots of a tile in the kernels for Mosaic GPU: rows of the matrix instructions of a warpgroup.
ROWS = 64


class Slots(NamedTuple):
    """The tokens in the slots of a tile or block.

    Attributes:
        exists: whether there is a token.
        token: its index in the map; past the last one if there is none.
        coord: its row in `rotation.coords`, if it exists.
        line: its row (queries) or column (keys) in `Tiles.by_slot`, also without a token.
        place: what `sees` compares; its meaning depends on the pattern.
    """

    exists: Bool[Array, " slots"]
    token: Int[Array, " slots"]
    coord: Int[Array, " slots"]
    line: Int[Array, " slots"]
    place: tuple[Int[Array, " slots"], ...]


def make_slots(
    exists: Bool[Array, " slots"],
    token: Int[Array, " slots"],
    tokens: int,
    coord: Int[Array, " slots"],
    line: Int[Array, " slots"],
    *place: Int[Array, " slots"],
) -> Slots:
    """Makes `Slots`, with the token after the last for missing ones: never read or written."""
    return Slots(exists, jnp.where(exists, token, tokens), coord, line, place)


def look_up_offsets(
    bias: Float[Array, "N entries"],
    down: Int[Array, "rows columns"],
    across: Int[Array, "rows columns"],
    size: tuple[int, int],
) -> Float[Array, "N rows columns"]:
    """Looks up a flat table of offsets [2 h - 1, 2 w - 1]; any entry for those outside.

    The program computes the offsets: as constants, those of large windows would fill it.
    """
    h, w = size
    return jnp.take(bias, (down + h - 1) * (2 * w - 1) + across + w - 1, axis=1, mode="clip")


def fold_offsets(
    gradient: Float[Array, "N rows columns"],
    down: Int[np.ndarray, " rows"],
    across: Int[np.ndarray, " columns"],
    size: tuple[int, int],
) -> Float[Array, "N entries"]:
    """The gradient of a table of offsets from that of pairs, the transpose of `look_up_offsets`.

    Computed as products with matrices of zeros and ones, one axis at a time. Offsets outside of the
    table are left out.

    Args:
        gradient: by pair of slots along one axis (rows) and along the other one.
        down, across: their offsets.
        size: (h, w) of the window or kernel.
    """
    selectors = [
        jnp.asarray(offset[:, None] + n - 1 == np.arange(2 * n - 1), gradient.dtype)
        for offset, n in zip((down, across), size, strict=True)
    ]
    folded = jnp.einsum("nab,ay,bx->nyx", gradient, *selectors, precision="highest")
    return folded.reshape(len(gradient), -1)


def first_query(key: Any, kernel: int) -> Any:
    """The first query of a neighbourhood that attends to a key; numbers of tokens of a class."""
    return select_numpy(key).where(key < kernel, 0, key - kernel + 1 + kernel // 2)


def last_query(key: Any, kernel: int, members: int) -> Any:
    """The last query that attends to a key, in a class of this many members."""
    at_end = key >= members - kernel
    return select_numpy(key).where(at_end, members - 1, key + kernel // 2)


def select_numpy(x: Any) -> Any:
    """The module for arrays like x: plans are made without jax, kernels with it."""
    return jnp if isinstance(x, jax.Array) else np


def padded_size(n: int) -> int:
    """The smallest power of two that is at least n and 16, the minimum of tensor cores."""
    return power_of_two(n, at_least=16)


class Tiles(abc.ABC):
    """The tiles of a pattern on a map; base of the classes of all patterns.

    Attributes, all of them integers:
        rows: slots of a tile.
        columns: slots of a block.
        tiles: tiles of a map.
        blocks: blocks of keys for each tile.
        repeats: tiles of a map that share the same part of the bias.
    """

    @abc.abstractmethod
    def tile(self, index: Int[Array, ""]) -> Slots:
        """The slots of a tile."""

    @abc.abstractmethod
    def block(self, index: Int[Array, ""], step: Int[Array, ""]) -> Slots:
        """The slots of the step-th block of a tile."""

    @abc.abstractmethod
    def sees(self, q: Slots, k: Slots) -> Bool[Array, "#rows columns"]:
        """Mask of the queries that attend to existing keys; anything for missing queries."""

    @abc.abstractmethod
    def transpose(self) -> "Tiles":
        """Tiles of keys with blocks of queries."""

    @abc.abstractmethod
    def by_slot(self, bias: Float[Array, "N entries"]) -> Float[Array, "N queries keys"]:
        """The bias of each pair of slots, by their `Slots.line`.

        Any entry for pairs that do not attend.
        """

    @abc.abstractmethod
    def fold(self, gradient: Float[Array, "N _ _"]) -> Float[Array, "N entries"]:
        """Sums the gradient of a bias by slot to that of its entries.

        Args:
            gradient: [N, tiles / repeats * rows, blocks * columns].
        """
