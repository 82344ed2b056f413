"""Rows of queries, keys and values inside the Triton kernels: loaded, turned and stored.

A row of D channels is held in pieces, because arrays in registers can be split but not joined:
first and second members of the pairs that turn, and the other channels. A product over channels is
the sum of the pieces' products.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from rope_jax_kernels.attention.arithmetic import fma, negative
from rope_jax_kernels.attention.slots import Slots, padded_size
from rope_jax_kernels.attention.task import Task


@dataclasses.dataclass(frozen=True)
class Columns:
    """Channels of one piece, padded to a power of two, and a mask of those inside, None for all."""

    channel: Int[Array, " C"]
    inside: Bool[Array, " C"] | None

    @classmethod
    def first(cls, channel: Int[Array, " C"], count: int) -> "Columns":
        """The first `count` of these channels."""
        (size,) = channel.shape
        inside = None if count == size else jnp.arange(size, dtype=jnp.int32) < count
        return cls(channel, inside)

    def mask(self, slots: Slots) -> Bool[Array, "slots C"]:
        """Mask of the numbers that exist in the rows of a tile or block."""
        exists = jnp.broadcast_to(slots.exists[:, None], (slots.exists.size, self.channel.size))
        return exists if self.inside is None else exists & self.inside[None, :]


def row_pieces(task: Task) -> list[Columns]:
    """The pieces of a row: both members of the pairs that turn, and other channels, if any."""
    runs = []
    if task.pairs:
        pair = jnp.arange(padded_size(task.pairs), dtype=jnp.int32)
        members = (pair, task.pairs + pair) if task.pairing == "half" else (2 * pair, 2 * pair + 1)
        runs = [Columns.first(member, task.pairs) for member in members]
    unturned = task.head_dim - 2 * task.pairs
    if unturned:
        column = jnp.arange(padded_size(unturned), dtype=jnp.int32)
        runs.append(Columns.first(2 * task.pairs + column, unturned))
    return runs


def whole_row(task: Task) -> Columns:
    """All channels as one piece."""
    column = jnp.arange(padded_size(task.head_dim), dtype=jnp.int32)
    return Columns.first(column, task.head_dim)


def load(
    ref: Any, item: Int[Array, ""], slots: Slots, head: Int[Array, ""], columns: Columns
) -> Float[Array, "slots C"]:
    """Loads a piece of the rows of a tile or block, with zeros for missing tokens."""
    place = ref.at[item, slots.token[:, None], head, columns.channel[None, :]]
    return plt.load(place, mask=columns.mask(slots), other=0)


def store(
    ref: Any,
    item: Int[Array, ""],
    slots: Slots,
    head: Int[Array, ""],
    columns: Columns,
    value: Float[Array, "slots C"],
) -> None:
    """Writes a piece, rounded once."""
    place = ref.at[item, slots.token[:, None], head, columns.channel[None, :]]
    plt.store(place, value.astype(ref.dtype), mask=columns.mask(slots))


class Turner:
    """The rotation of a kernel's rows, from refs (cos, sin) [N or 1, T, R] or ().

    Where the frequencies need a gradient, (cos, sin, coords), with coords [T, A].
    """

    def __init__(self, task: Task, refs: tuple, head: Int[Array, ""]):
        self.task, self.columns = task, row_pieces(task)
        self.tables, self.coords = refs[:2], refs[2:]
        self.head = head if refs and refs[0].shape[0] > 1 else 0

    def turns(self, slots: Slots) -> list[Float[Array, "slots R"]]:
        """Cosine and sine of the slots' angles; empty without rotation."""
        mask = self.columns[0].mask(slots)
        pair = jnp.arange(mask.shape[1], dtype=jnp.int32)
        return [
            plt.load(ref.at[self.head, slots.coord[:, None], pair[None, :]], mask=mask, other=0)
            for ref in self.tables
        ]

    def load(
        self, ref: Any, item: Int[Array, ""], slots: Slots, head: Int[Array, ""]
    ) -> list[Array]:
        """Loads rows of queries or keys in pieces, and turns them."""
        pieces = [load(ref, item, slots, head, columns) for columns in self.columns]
        if self.tables:
            (cos, sin), dtype = self.turns(slots), pieces[0].dtype
            a, b = (piece.astype(jnp.float32) for piece in pieces[:2])
            turned = fma(self.task, a, cos, negative(b) * sin), fma(self.task, b, cos, a * sin)
            pieces[:2] = [x.astype(dtype) for x in turned]
        return pieces

    def store_back(
        self,
        ref: Any,
        item: Int[Array, ""],
        slots: Slots,
        head: Int[Array, ""],
        pieces: list[Array],
    ) -> None:
        """Turns the gradient of turned rows back and writes it."""
        if self.tables:
            (cos, sin), (a, b) = self.turns(slots), pieces[:2]
            turned = fma(self.task, a, cos, b * sin), fma(self.task, b, cos, negative(a) * sin)
            pieces = [*turned, *pieces[2:]]
        for columns, piece in zip(self.columns, pieces, strict=True):
            store(ref, item, slots, head, columns, piece)

    def gradient(self, slots: Slots, turned: list[Array], gradients: list[Array]) -> list[Array]:
        """The rows' contribution to the gradient of the frequencies, [R] for each axis.

        Computed from the turned rows and their gradients; empty where it is not needed.
        """
        if not self.coords:
            return []
        (a, b), (da, db) = (x.astype(jnp.float32) for x in turned[:2]), gradients[:2]
        dtheta = fma(self.task, db, a, negative(da) * b)
        (coords,), sums = self.coords, []
        for axis in range(coords.shape[1]):
            place = coords.at[slots.coord, axis]
            along = plt.load(place, mask=slots.exists, other=0).astype(jnp.float32)
            sums.append(jnp.sum(along[:, None] * dtheta, axis=0))
        return sums

    def no_gradient(self) -> list[Array]:
        """Zeros of the shapes of `gradient`; empty where that is not needed."""
        axes = self.coords[0].shape[1] if self.coords else 0
        return [jnp.zeros(self.columns[0].channel.shape, jnp.float32)] * axes
