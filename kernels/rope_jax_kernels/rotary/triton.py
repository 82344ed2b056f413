"""The rotary operations by one in-place Pallas-Triton kernel; see `kernel`."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from rope_jax_kernels import device
from rope_jax_kernels.arithmetic import cos_sin
from rope_jax_kernels.rotary import tile_sizes
from rope_jax_kernels.rotary.kernel import Kernel, Rows, angle_arrays
from rope_jax_kernels.rotation import Pairing, Rotation


class Turns:
    """The rows of one program, and how each of them turns.

    Attributes:
        index: of each row among those that turn.
        pair: of each pair of channels.
        in_tile: [rows, 1], mask of the rows that exist.
        inside: [rows, R], mask of the pairs of rows that exist.
        cos, sin: of the angle of each pair, in the direction of the rows.
    """

    def __init__(self, rows: Rows, tile: tile_sizes.Tile, angles: tuple):
        self.rows, self.tile = rows, tile
        self.index = pl.program_id(0) * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
        self.pair = jnp.arange(tile.pairs, dtype=jnp.int32)
        self.in_tile = (self.index < rows.tokens * rows.heads)[:, None]
        self.inside = self.in_tile & (self.pair < angles[-1].shape[-1])[None, :]
        self.cos, sin = cos_sin(self._theta(angles))
        self.sin = rows.direction * sin

    def _theta(self, angles: tuple) -> Float[Array, "rows R"]:
        """Theta in float32, from refs of (coords, freqs) or of (theta,)."""
        token, head = self.rows.token_and_head(self.index)
        pair, inside = self.pair, self.inside
        head = head[:, None] if angles[-1].shape[0] > 1 else 0
        if len(angles) == 1:
            place = angles[0].at[head, token[:, None], pair[None, :]]
            return plt.load(place, mask=inside, other=0).astype(jnp.float32)
        coords, freqs = angles
        theta = None
        for axis in range(coords.shape[1]):
            along = plt.load(coords.at[token, axis], mask=token < self.rows.tokens, other=0)
            along = along.astype(jnp.float32)
            if freqs.shape[0] > 1:
                freq = plt.load(freqs.at[head, axis, pair[None, :]], mask=inside, other=0)
            else:
                freq = plt.load(freqs.at[0, axis, pair], mask=pair < freqs.shape[2], other=0)
                freq = freq[None, :]
            term = along[:, None] * freq.astype(jnp.float32)
            theta = term if theta is None else theta + term
        return theta

    def turn(
        self, chunks: list[Array], before: list[Array], dtheta: Array | None
    ) -> tuple[list[Array], Array | None]:
        """Turns channels of the rows and rounds them once, to their own dtype.

        Args:
            chunks: first and second members of the pairs, or both alternately ("interleaved").
            before: the saved inputs, or [].
            dtheta: the gradient of theta so far, to which that of these channels is added.
        """
        (x, y), dtype = self._members(chunks), chunks[0].dtype
        x, y = x * self.cos - y * self.sin, y * self.cos + x * self.sin
        if before:
            u, v = self._members(before)
            dtheta = dtheta + (u * y - v * x)
        turned = [x.astype(dtype), y.astype(dtype)]
        if self.rows.pairing == "interleaved":
            turned = [jnp.stack(turned, axis=2).reshape(self.tile.rows, 2 * self.tile.pairs)]
        return turned, dtheta

    def _members(self, chunks: list[Array]) -> list[Float[Array, "rows R"]]:
        """First and second members of the pairs, float32."""
        if self.rows.pairing == "interleaved":
            pairs = chunks[0].reshape(self.tile.rows, self.tile.pairs, 2)
            chunks = jnp.unstack(pairs, axis=2)
        return [x.astype(jnp.float32) for x in chunks]

    def over_items(self, step: Callable[[Array | int, Any], Any], sums: tuple) -> None:
        """dtheta = step(i, dtheta) for all batch items of the program, those in flight at a time.

        Where there is a ref for it, writes dtheta, the gradient of theta; otherwise it is None.
        """
        tile = self.tile
        dtheta = jnp.zeros((tile.rows, tile.pairs), jnp.float32) if sums else None
        dtheta = (
            step(0, dtheta) if tile.steps == 1 else jax.lax.fori_loop(0, tile.steps, step, dtheta)
        )
        for ref in sums:
            place = ref.at[pl.program_id(1), self.index[:, None], self.pair[None, :]]
            # The pass turned gradients back: theta has the opposite sign of the differentiated one.
            plt.store(place, -self.rows.direction * dtheta, mask=self.inside)


def rotary_kernel(
    operands: tuple, targets: tuple, sums: tuple, *, rows: Rows, tile: tile_sizes.Tile
) -> None:
    """One program: a tile of rows of `tile.batch` batch items.

    Args:
        operands: refs of the arrays to turn, of (coords, freqs) or (theta,), and of the inputs of
            the forward pass or ().
        targets: of the turned arrays.
        sums: with saved inputs, of the gradient of theta summed over this program's batch items.
        rows: meaning of the rows.
        tile: size of the tile.
    """
    sources, angles, saved = operands
    batch, pairs = sources[0].shape[0], angles[-1].shape[-1]
    first = pl.program_id(1) * tile.batch
    turns = Turns(rows, tile, angles)
    if rows.pairing == "half":
        channels = [(turns.pair, turns.inside), (pairs + turns.pair, turns.inside)]
    else:
        channel = jnp.arange(2 * tile.pairs, dtype=jnp.int32)
        channels = [(channel, turns.in_tile & (channel < 2 * pairs)[None, :])]

    def load(ref: Any, item: Array, row: Array) -> list[Array]:
        # Zeros outside, so that sums over batch items need no mask of their own.
        return [
            plt.load(ref.at[item, row[:, None], c[None, :]], mask=mask & (item < batch), other=0)
            for c, mask in channels
        ]

    def step(i: Array | int, dtheta: Array | None) -> Array | None:
        items = [first + i * tile.items + j for j in range(tile.items)]
        places = list(itertools.product(items, range(len(sources)), rows.rows(turns.index)))
        # All loads precede the first store: the compiler cannot rule out that a store changes what
        # is read after it.
        loaded = [
            (load(sources[a], item, row), load(saved[a], item, row) if saved else [])
            for item, a, row in places
        ]
        for (item, a, row), (chunks, before) in zip(places, loaded, strict=True):
            chunks, dtheta = turns.turn(chunks, before, dtheta)
            for x, (c, mask) in zip(chunks, channels, strict=True):
                place = targets[a].at[item, row[:, None], c[None, :]]
                plt.store(place, x, mask=mask & (item < batch))
        return dtheta

    turns.over_items(step, sums)


def launch(
    rows: Rows, arrays: tuple, angles: tuple, saved: tuple = (), *, in_place: bool = True
) -> tuple[tuple, Array | None]:
    """`Kernel.launch`."""
    batch, _, head_dim = arrays[0].shape
    count, pairs = rows.tokens * rows.heads, angles[-1].shape[-1]
    itemsize = min(x.dtype.itemsize for x in arrays)
    tile = tile_sizes.plan_spread_tile(batch, count, pairs, head_dim, itemsize, rows.pairing)
    warps = tile_sizes.WARPS
    if rows.tile:
        ((_, (tile_rows, items, steps, warps)),) = rows.tile
        tile = tile_sizes.Tile(tile_rows, tile.pairs, items, steps)
    operands, outputs = (arrays, angles, saved), [(x.shape, x.dtype) for x in arrays]
    kernel = functools.partial(rotary_kernel, rows=rows, tile=tile)
    return run(kernel, "rotary", count, operands, outputs, warps=warps, in_place=in_place)


def run(
    kernel: functools.partial,
    name: str,
    count: int,
    operands: tuple,
    outputs: list[tuple[tuple[int, ...], Any]],
    *,
    warps: int = tile_sizes.WARPS,
    in_place: bool = False,
) -> tuple[tuple, Array | None]:
    """Runs a kernel of operands, targets and sums.

    Args:
        kernel: with its rows and tile as keywords.
        name: of the kernel.
        count: rows to divide into tiles.
        operands: the arrays, the angles, and the saved inputs or ().
        outputs: shape and dtype of each target.
        warps: of a program.
        in_place: whether the targets take the place of the arrays.

    Returns:
        The targets, and with saved inputs the sums of the gradient of theta.
    """
    arrays, angles, saved = operands
    rows, tile = kernel.keywords["rows"], kernel.keywords["tile"]
    grid = (pl.cdiv(count, tile.rows), pl.cdiv(arrays[0].shape[0], tile.batch))
    sums_shape = grid[1], rows.tokens * rows.heads, angles[-1].shape[-1]
    *targets, sums = device.shapes_like(arrays[0], *outputs, (sums_shape, jnp.float32))
    targets, sums = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=(tuple(targets), (sums,) if saved else ()),
        input_output_aliases={i: i for i in range(len(arrays))} if in_place else {},
        compiler_params=plt.CompilerParams(num_warps=warps),
        interpret=rows.interpret,
        name=name,
    )(operands)
    return targets, sums[0] if saved else None


KERNEL = Kernel(launch)
rotate, rotate_qkv, rotate_by_angles = KERNEL.rotate, KERNEL.rotate_qkv, KERNEL.rotate_by_angles


def refusal(
    arrays: dict[str, Any],
    *,
    rotation: Rotation | None = None,
    theta: Array | None = None,
    pairing: Pairing | None = None,
    layout: str | None = None,
) -> str | None:
    """The reason why the kernel cannot serve a call with these arguments, or None."""
    return device.refusal_of_arrays(arrays | angle_arrays(rotation, theta)) or device.refusal()
