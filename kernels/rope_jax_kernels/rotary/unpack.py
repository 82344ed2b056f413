"""From the packed projection to q, k and v that lie apart, rotated on the way, and back: what stands between a dense layer and an
attention that wants its operands apart, such as cuDNN's.

The kernel reads and writes every channel once, in one launch, in either direction; the gradient of one direction is the other. Rows,
angles and their gradient are those of `in_place`; unlike there nothing is in place, so that the inputs that the gradient of learnable
frequencies needs are kept without a copy.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from rope_jax_kernels.backends import Backend, choose
from rope_jax_kernels.rotary import checks, device, reference, tiling
from rope_jax_kernels.rotary.in_place import Rows, gradients_of_angles, vary_alike
from rope_jax_kernels.rotary.triton import KERNEL, tile_angles
from rope_jax_kernels.rotation import Rotation

# Raw data of one thread between its loads and its stores: 64 registers.
BYTES_IN_FLIGHT = 256


def tile_of(batch: int, rows: int, pairs: int, head_dim: int, itemsize: int, pairing: str) -> tiling.Tile:
    """The tile of `tiling`, with one batch item in flight, because here whole rows are, of three arrays and not the turning part of two."""
    tile = tiling.tile(batch, rows, pairs, head_dim, itemsize, pairing)
    most = tiling.THREADS * BYTES_IN_FLIGHT // (tiling.power_of_two_from(head_dim) * itemsize)
    while tile.rows > max(1, most):
        tile = dataclasses.replace(tile, rows=tile.rows // 2)
    steps = 1
    while steps < tiling.MOST_STEPS and pl.cdiv(rows, tile.rows) * pl.cdiv(batch, 2 * steps) >= tiling.PROGRAMS:
        steps *= 2
    return dataclasses.replace(tile, items=1, steps=steps)


def moving_kernel(*refs: Any, rows: Rows, tile: tiling.Tile, pairs: int, sources: int, angles: int, saved: int) -> None:
    """One program: a tile of rows of `tile.batch` batch items, of q, k and v.

    Args:
        *refs: `sources` arrays, one packed or three apart; `angles` refs of (coords, freqs); `saved` inputs of the forward pass, packed
            or apart as its sources were; then the outputs: three arrays or one, and with saved inputs the sums over this program's
            batch items of the gradient of theta.
        rows: what rows mean; they turn q and k.
        tile: the program's share.
        pairs: R.
        sources: 1 or 3.
        angles: how many refs describe the angles.
        saved: 4 - sources, or 0.
    """
    taken, refs = refs[:sources], refs[sources:]
    angle_refs, refs = refs[:angles], refs[angles:]
    inputs, refs = refs[:saved], refs[saved:]
    given, sums = refs[: 4 - sources], refs[4 - sources :]
    batch, _, head_dim = taken[0].shape
    first = pl.program_id(1) * tile.batch

    index = pl.program_id(0) * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)
    pair = jnp.arange(tile.pairs, dtype=jnp.int32)
    in_tile = (index < rows.tokens * rows.heads)[:, None]
    inside = in_tile & (pair < pairs)[None, :]
    token, head = rows.token_and_head(index)
    theta = tile_angles(rows, angle_refs, token, head, pair, inside)
    cos, sin = jnp.cos(theta), rows.direction * jnp.sin(theta)
    q, k = rows.rows(index)
    packed_rows = (q, k, k + rows.heads)

    def up_to(end: int, start: int = 0, width: int | None = None) -> list[tuple[Array, Array]]:
        """Channels from start to end, with the mask that ends them; none where there are none."""
        c = start + jnp.arange(width or tiling.power_of_two_from(max(1, end - start)), dtype=jnp.int32)
        return [(c, in_tile & (c < end)[None, :])] if start < end else []

    if rows.pairing == "half":
        turning = up_to(pairs, 0, tile.pairs) + up_to(2 * pairs, pairs, tile.pairs)
    else:
        turning = up_to(2 * pairs, 0, 2 * tile.pairs)
    parts = (turning + up_to(head_dim, 2 * pairs),) * 2 + (up_to(head_dim),)

    def at(arrays: tuple, part: int, item: Array, c: Array) -> Any:
        """Where channels c of q, k or v lie."""
        ref, row = (arrays[0], packed_rows[part]) if len(arrays) == 1 else (arrays[part], index)
        return ref.at[item, row[:, None], c[None, :]]

    def load(arrays: tuple, part: int, item: Array, channels: list) -> list[Array]:
        # Zeros outside, so that sums over batch items need no mask of their own.
        return [plt.load(at(arrays, part, item, c), mask=mask & (item < batch), other=0) for c, mask in channels]

    def members(chunks: list[Array]) -> tuple[Array, Array]:
        """First and second members of the pairs, float32."""
        if rows.pairing == "interleaved":
            chunks = jnp.unstack(chunks[0].reshape(tile.rows, tile.pairs, 2), axis=2)
        return tuple(x.astype(jnp.float32) for x in chunks)

    def turned(chunks: list[Array], dtheta: Array | None, before: list[Array]) -> tuple[list[Array], Array | None]:
        """The chunks of q or k with the first ones turned and rounded once, and the gradient of theta so far."""
        n = len(turning)
        x, y = members(chunks[:n])
        x, y = x * cos - y * sin, y * cos + x * sin
        if before:
            u, v = members(before)
            dtheta = dtheta + (u * y - v * x)
        new = [x.astype(chunks[0].dtype), y.astype(chunks[0].dtype)]
        if rows.pairing == "interleaved":
            new = [jnp.stack(new, axis=2).reshape(tile.rows, 2 * tile.pairs)]
        return new + chunks[n:], dtheta

    row_bytes = tiling.power_of_two_from(head_dim) * taken[0].dtype.itemsize * tile.rows // tiling.THREADS
    together = 3 if 3 * row_bytes <= BYTES_IN_FLIGHT else 1

    def step(i: Array | int, dtheta: Array | None) -> Array | None:
        item = first + i
        for some in itertools.batched(range(3), together):
            # These loads stand before the first store: the compiler cannot know that a store does not touch what is read after it.
            loaded = [
                (load(taken, part, item, parts[part]), load(inputs, part, item, turning if saved and part < 2 else [])) for part in some
            ]
            for part, (chunks, before) in zip(some, loaded, strict=True):
                if part < 2:
                    chunks, dtheta = turned(chunks, dtheta, before)
                for x, (c, mask) in zip(chunks, parts[part], strict=True):
                    plt.store(at(given, part, item, c), x, mask=mask & (item < batch))
        return dtheta

    dtheta = jnp.zeros((tile.rows, tile.pairs), jnp.float32) if saved else None
    dtheta = step(0, dtheta) if tile.steps == 1 else jax.lax.fori_loop(0, tile.steps, step, dtheta)
    for ref in sums:
        # The pass turned gradients back; the angle that it turned by has the opposite sign of the one that is differentiated.
        plt.store(ref.at[pl.program_id(1), index[:, None], pair[None, :]], -rows.direction * dtheta, mask=inside)


def launch(rows: Rows, arrays: tuple, angles: tuple, saved: tuple = ()) -> tuple[tuple, Array | None]:
    """Takes (qkv [B, L * 3 * N, D],) apart into q, k and v [B, L * N, D], or packs these three, in one launch; q and k turn.

    Returns:
        The arrays, and with `saved` the partial sums of the gradient of theta, [G, L * N, R] float32.
    """
    batch, _, head_dim = arrays[0].shape
    count, pairs, dtype = rows.tokens * rows.heads, angles[1].shape[2], arrays[0].dtype
    tile = tile_of(batch, count, pairs, head_dim, dtype.itemsize, rows.pairing)
    grid = (pl.cdiv(count, tile.rows), pl.cdiv(batch, tile.batch))
    shape = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(arrays[0]).manual_axis_type)
    shapes = [shape((batch, count, head_dim), dtype)] * 3 if len(arrays) == 1 else [shape((batch, 3 * count, head_dim), dtype)]
    if saved:
        shapes = [*shapes, shape((grid[1], count, pairs), jnp.float32)]
    outputs = pl.pallas_call(
        functools.partial(moving_kernel, rows=rows, tile=tile, pairs=pairs, sources=len(arrays), angles=len(angles), saved=len(saved)),
        grid=grid,
        out_shape=shapes,
        compiler_params=plt.CompilerParams(num_warps=tiling.WARPS),
        interpret=rows.interpret,
        name="rotary_unpack" if len(arrays) == 1 else "rotary_pack",
    )(*arrays, *angles, *saved)
    return (tuple(outputs[:-1]), outputs[-1]) if saved else (tuple(outputs), None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def move(rows: Rows, backward: str, arrays: tuple, angles: tuple) -> tuple:
    """`launch` with a gradient, which is the way back, by "triton" or "xla"."""
    return launch(rows, arrays, angles)[0]


def move_forward(rows: Rows, backward: str, arrays: tuple, angles: tuple) -> tuple[tuple, tuple]:
    """Saves the angles' few numbers, and the inputs only where the angles are differentiated."""
    values, angle_values = tuple(x.value for x in arrays), tuple(x.value for x in angles)
    # `move` and not `launch`, here and in the backward pass: so derivatives of any order with respect to the data exist.
    return move(rows, backward, values, angle_values), (angle_values, values if any(x.perturbed for x in angles) else ())


def move_backward(rows: Rows, backward: str, residuals: tuple, gradients: tuple) -> tuple[tuple, tuple | None]:
    """Moves the gradients back; with saved inputs also reduces the partial sums of the gradient of theta."""
    angles, saved = residuals
    gradients = tuple(jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g for g in gradients)
    gradients, angles = vary_alike(gradients, angles)  # zeros made here do not vary yet
    batch, _, head_dim = gradients[0].shape
    if not saved and backward == "xla":
        rotation = Rotation(*angles, rows.pairing)
        if len(gradients) == 1:
            moved = unpack_by_xla(gradients[0].reshape(batch, rows.tokens, 3, rows.heads, head_dim), rotation)
        else:
            moved = (pack_by_xla(*(g.reshape(batch, rows.tokens, rows.heads, head_dim) for g in gradients), rotation),)
        return tuple(x.reshape(batch, -1, head_dim) for x in moved), None
    back = dataclasses.replace(rows, direction=-rows.direction)
    if not saved:
        return move(back, backward, gradients, angles), None
    gradients, partial = launch(back, gradients, angles, saved)
    return gradients, gradients_of_angles(rows, angles, partial)


move.defvjp(move_forward, move_backward, symbolic_zeros=True)


def unpack_by_kernel(qkv: Float[Array, "B L 3 N D"], rotation: Rotation, backward: str = "xla") -> tuple[Array, Array, Array]:
    """See `unpack_and_rotate`."""
    batch, tokens, _, heads, head_dim = qkv.shape
    arrays, angles = vary_alike((qkv.reshape(batch, -1, head_dim),), (rotation.coords, rotation.freqs))
    rows = Rows(tokens, heads, "L3N", rotation.pairing, 1, device.interpreted())
    return tuple(x.reshape(batch, tokens, heads, head_dim) for x in move(rows, backward, arrays, angles))


def pack_by_kernel(q: Array, k: Array, v: Array, rotation: Rotation) -> Float[Array, "B L 3 N D"]:
    """See `rotate_back_and_pack`."""
    batch, tokens, heads, head_dim = q.shape
    arrays, angles = vary_alike(tuple(x.reshape(batch, -1, head_dim) for x in (q, k, v)), (rotation.coords, rotation.freqs))
    rows = Rows(tokens, heads, "L3N", rotation.pairing, -1, device.interpreted())
    return move(rows, "triton", arrays, angles)[0].reshape(batch, tokens, 3, heads, head_dim)


def unpack_by_xla(qkv: Float[Array, "B L 3 N D"], rotation: Rotation, backward: str = "xla") -> tuple[Array, Array, Array]:
    """See `unpack_and_rotate`; `backward` makes no difference."""
    return *reference.rotate(qkv[:, :, 0], qkv[:, :, 1], rotation, layout="BLND"), qkv[:, :, 2]


def pack_by_xla(q: Array, k: Array, v: Array, rotation: Rotation) -> Float[Array, "B L 3 N D"]:
    """See `rotate_back_and_pack`.

    The transposed form, a sum of padded parts and not their concatenation: XLA computes the gradient of the projection's bias in the
    same pass, which it does not do behind a concatenation.
    """
    # A linear map has one derivative everywhere, so that this point is never computed. (`jax.linear_transpose` fails in `shard_map`.)
    anywhere = jnp.stack([q, k, v], axis=2)
    return jax.vjp(lambda qkv: unpack_by_xla(qkv, rotation), anywhere)[1]((q, k, v))[0]


UNPACK = {
    "xla": Backend(unpack_by_xla),
    "triton": Backend(unpack_by_kernel, lambda qkv, rotation, backward: KERNEL.refuses_rotate_qkv(qkv, rotation)),
}
PACK = {
    "xla": Backend(pack_by_xla),
    "triton": Backend(pack_by_kernel, lambda q, k, v, rotation: KERNEL.refuses_rotate(q, k, rotation, layout="BLND")),
}


def unpack_and_rotate(
    qkv: Float[Array, "B L three N D"],
    rotation: Rotation | None,
    *,
    implementation: str | None = None,
    backward: str = "xla",
) -> tuple[Array, Array, Array]:
    """Takes q, k and v out of the packed projection, and rotates q and k: equal to `rotate` on the parts, bit for bit.

    Args:
        qkv: [B, L, 3, N, D], as one dense layer of 3 N D outputs gives it.
        rotation: see `rotate`; None only takes apart, which XLA does in one pass of its own.
        implementation: "xla", "triton", or None: the kernel on a GPU where XLA need not partition it. Counted, not measured: the kernel
            moves the bytes of XLA's form in one launch instead of four (`python -m benchmarks model_path`).
        backward: what computes the gradient behind the kernel, "xla" or "triton". XLA's pass moves the same bytes and takes the
            gradient of the projection's bias along. Where coords or freqs are differentiated it is always the kernel.

    Returns:
        q, k and v, [B, L, N, D] each, in qkv's dtype.

    Raises:
        ValueError: shapes do not fit each other, or the named implementation is unknown or refuses.
        TypeError: an argument is not floating-point.
    """
    checks.check_packed(qkv)
    if rotation is None:
        return tuple(qkv[:, :, i] for i in range(3))
    if backward not in ("triton", "xla"):
        raise ValueError(f"backward={backward!r} is unknown; use 'xla' or 'triton'")
    _, tokens, _, heads, head_dim = qkv.shape
    checks.check_rotation(rotation, tokens, heads, head_dim, "qkv")
    if implementation is None and KERNEL.refuses_rotate_qkv(qkv, rotation) is None:
        implementation = "triton" if device.is_gpu() and not device.may_be_partitioned() else "xla"
    kwargs = {"backward": backward}
    return choose("unpack_and_rotate", UNPACK, implementation, (qkv, rotation), kwargs)(qkv, rotation, **kwargs)


def rotate_back_and_pack(
    q: Array, k: Array, v: Array, rotation: Rotation | None, *, implementation: str | None = None
) -> Float[Array, "B L 3 N D"]:
    """The way back: turns q and k by minus their angles and packs the three; of gradients it is the transpose of `unpack_and_rotate`.

    Args:
        q: [B, L, N, D], or the gradient with respect to it.
        k: like q.
        v: like q.
        rotation: the one that `unpack_and_rotate` was given.
        implementation: "xla", "triton", or None for "xla" (see `unpack_and_rotate`).

    Raises:
        ValueError: shapes do not fit each other, or the named implementation is unknown or refuses.
        TypeError: an argument is not floating-point.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.check_floating(name, x)
        if (x.shape, x.dtype) != (q.shape, q.dtype):
            raise ValueError(f"{name} is {x.dtype}{x.shape}; it must be like q, {q.dtype}{q.shape}")
    if rotation is None:
        return jnp.stack([q, k, v], axis=2)
    checks.check_rotation(rotation, *checks.split_shape("q", q, "BLND"), "q")
    return choose("rotate_back_and_pack", PACK, implementation or "xla", (q, k, v, rotation), {})(q, k, v, rotation)
