"""The rotary operations by one in-place Pallas-Triton kernel; see `kernel`."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from rope_jax_kernels import choices, device
from rope_jax_kernels.arithmetic import cos_sin
from rope_jax_kernels.rotary import tile_sizes
from rope_jax_kernels.rotary.kernel import Kernel, Rows, named_angles
from rope_jax_kernels.rotation import Pairing, Rotation


def tile_angles(
    rows: Rows,
    angles: tuple,
    token: Int[Array, " rows"],
    head: Int[Array, " rows"],
    pair: Int[Array, " R"],
    inside: Bool[Array, "rows R"],
) -> Float[Array, "rows R"]:
    """Theta of a tile in float32, from refs of (coords, freqs) or of (theta,)."""
    head = head[:, None] if angles[-1].shape[0] > 1 else 0
    if len(angles) == 1:
        place = angles[0].at[head, token[:, None], pair[None, :]]
        return plt.load(place, mask=inside, other=0).astype(jnp.float32)
    coords, freqs = angles
    theta = None
    for axis in range(coords.shape[1]):
        along = plt.load(coords.at[token, axis], mask=token < rows.tokens, other=0)
        along = along.astype(jnp.float32)
        if freqs.shape[0] > 1:
            freq = plt.load(freqs.at[head, axis, pair[None, :]], mask=inside, other=0)
        else:
            freq = plt.load(freqs.at[0, axis, pair], mask=pair < freqs.shape[2], other=0)[None, :]
        term = along[:, None] * freq.astype(jnp.float32)
        theta = term if theta is None else theta + term
    return theta


def rotary_kernel(
    *refs: Any, rows: Rows, tile: tile_sizes.Tile, pairs: int, arrays: int, angles: int, saved: int
) -> None:
    """One program: a tile of rows of `tile.batch` batch items.

    Args:
        *refs: `arrays` arrays to turn; `angles` refs of (coords, freqs) or (theta,); `saved` inputs
            of the forward pass; then the outputs: the turned arrays and, with saved inputs, the
            gradient of theta summed over this program's batch items.
        rows: meaning of the rows.
        tile: size of the tile.
        pairs: R.
        arrays: how many arrays turn.
        angles: how many refs describe the angles.
        saved: `arrays`, or 0.
    """
    sources, refs = refs[:arrays], refs[arrays:]
    angle_refs, refs = refs[:angles], refs[angles:]
    inputs, refs = refs[:saved], refs[saved:]
    targets, sums = refs[:arrays], refs[arrays:]
    batch = sources[0].shape[0]
    first = pl.program_id(1) * tile.batch

    index = pl.program_id(0) * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
    pair = jnp.arange(tile.pairs, dtype=jnp.int32)
    inside = (index < rows.tokens * rows.heads)[:, None] & (pair < pairs)[None, :]
    token, head = rows.token_and_head(index)
    theta = tile_angles(rows, angle_refs, token, head, pair, inside)
    cos, sin = cos_sin(theta)
    sin = rows.direction * sin

    if rows.pairing == "half":
        channels = [pair, pairs + pair]
        in_row = inside
    else:
        channels = [jnp.arange(2 * tile.pairs, dtype=jnp.int32)]
        in_row = (index < rows.tokens * rows.heads)[:, None] & (channels[0] < 2 * pairs)[None, :]

    def load(ref: Any, item: Array, row: Array) -> tuple[Array, Array]:
        """First and second members of the pairs of a tile."""
        # Zeros outside, so that sums over batch items need no mask of their own.
        parts = [
            plt.load(ref.at[item, row[:, None], c[None, :]], mask=in_row & (item < batch), other=0)
            for c in channels
        ]
        if rows.pairing == "half":
            return tuple(parts)
        return jnp.unstack(parts[0].reshape(tile.rows, tile.pairs, 2), axis=2)

    def store(ref: Any, item: Array, row: Array, members: tuple[Array, Array]) -> None:
        """Writes the members of the pairs, rounded once."""
        members = [x.astype(ref.dtype) for x in members]
        if rows.pairing == "interleaved":
            members = [jnp.stack(members, axis=2).reshape(tile.rows, 2 * tile.pairs)]
        for c, x in zip(channels, members, strict=True):
            plt.store(ref.at[item, row[:, None], c[None, :]], x, mask=in_row & (item < batch))

    def step(i: Array | int, dtheta: Array | None) -> Array | None:
        items = [first + i * tile.items + j for j in range(tile.items)]
        places = [
            (item, a, row) for item in items for a in range(arrays) for row in rows.rows(index)
        ]
        # All loads precede the first store: the compiler cannot rule out that a store changes what
        # is read after it.
        loaded = [
            (load(sources[a], item, row), [load(ref, item, row) for ref in inputs[a : a + 1]])
            for item, a, row in places
        ]
        for (item, a, row), (members, before) in zip(places, loaded, strict=True):
            x, y = (m.astype(jnp.float32) for m in members)
            x, y = x * cos - y * sin, y * cos + x * sin
            for u, v in before:
                dtheta = dtheta + (u.astype(jnp.float32) * y - v.astype(jnp.float32) * x)
            store(targets[a], item, row, (x, y))
        return dtheta

    dtheta = jnp.zeros((tile.rows, tile.pairs), jnp.float32) if sums else None
    dtheta = step(0, dtheta) if tile.steps == 1 else jax.lax.fori_loop(0, tile.steps, step, dtheta)
    for ref in sums:
        # The pass turned gradients back: its angle has the opposite sign of the differentiated one.
        plt.store(
            ref.at[pl.program_id(1), index[:, None], pair[None, :]],
            -rows.direction * dtheta,
            mask=inside,
        )


def launch(
    rows: Rows, arrays: tuple, angles: tuple, saved: tuple = (), *, in_place: bool = True
) -> tuple[tuple, Array | None]:
    """`Kernel.launch`."""
    batch, _, head_dim = arrays[0].shape
    pairs = angles[-1].shape[-1]
    itemsize = min(x.dtype.itemsize for x in arrays)
    tile = tile_sizes.spread_tile_of(
        batch, rows.tokens * rows.heads, pairs, head_dim, itemsize, rows.pairing
    )
    warps = tile_sizes.WARPS
    if rows.tile:
        ((_, (tile_rows, items, steps, warps)),) = rows.tile
        tile = tile_sizes.Tile(tile_rows, tile.pairs, items, steps)
    grid = (pl.cdiv(rows.tokens * rows.heads, tile.rows), pl.cdiv(batch, tile.batch))
    varying = jax.typeof(arrays[0]).manual_axis_type
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying) for x in arrays]
    if saved:
        shapes.append(
            jax.ShapeDtypeStruct(
                (grid[1], rows.tokens * rows.heads, pairs), jnp.float32, manual_axis_type=varying
            )
        )
    kernel = functools.partial(
        rotary_kernel,
        rows=rows,
        tile=tile,
        pairs=pairs,
        arrays=len(arrays),
        angles=len(angles),
        saved=len(saved),
    )
    outputs = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=shapes,
        input_output_aliases={i: i for i in range(len(arrays))} if in_place else {},
        compiler_params=plt.CompilerParams(num_warps=warps),
        interpret=rows.interpret,
        name="rotary",
    )(*arrays, *angles, *saved)
    return tuple(outputs[: len(arrays)]), outputs[-1] if saved else None


def other_tiles(training: bool, arguments: dict[str, Any]) -> list[choices.Tile]:
    """Tiles worth measuring for a call beside the planned one: (rows, items, steps, warps).

    Args:
        training: whether gradients are taken; the backward pass has the tile of the forward pass.
        arguments: of the call, by name; shapes suffice.
    """
    del training
    x = next(arguments[name] for name in ("q", "qkv", "x") if name in arguments)
    angles = named_angles(arguments.get("rotation"), arguments.get("theta"))
    pairs, head_dim = list(angles.values())[-1].shape[-1], x.shape[-1]
    pairing = arguments["pairing"] if "pairing" in arguments else arguments["rotation"].pairing
    rows = math.prod(x.shape[1:-1]) // (3 if x.ndim == 5 else 1)
    tile = tile_sizes.spread_tile_of(x.shape[0], rows, pairs, head_dim, x.dtype.itemsize, pairing)
    sizes = tile.rows, tile.items, tile.steps, tile_sizes.WARPS
    changed = (
        (2 * tile.rows, tile.items, tile.steps, 2 * tile_sizes.WARPS),
        (2 * tile.rows, max(1, tile.items // 2), tile.steps, tile_sizes.WARPS),
        (max(1, tile.rows // 2), tile.items, tile.steps, tile_sizes.WARPS),
        (tile.rows, max(1, tile.items // 2), 2 * tile.steps, tile_sizes.WARPS),
        (tile.rows, tile.items, 1, tile_sizes.WARPS),
    )
    return [(("rows", other),) for other in dict.fromkeys(changed) if other != sizes]


KERNEL = Kernel(launch)
rotate, rotate_qkv, rotate_by_angles = KERNEL.rotate, KERNEL.rotate_qkv, KERNEL.rotate_by_angles


def refusal(
    *,
    rotation: Rotation | None = None,
    theta: Array | None = None,
    pairing: Pairing | None = None,
    layout: str | None = None,
    **arrays: Any,
) -> str | None:
    """Why the kernel cannot serve a call with these arguments, or None."""
    del pairing, layout
    return device.refusal_of_arrays(arrays | named_angles(rotation, theta)) or device.refusal()
