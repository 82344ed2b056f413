"""The rotary operations as one Pallas-Triton kernel that works in place.

Arrays are seen as [B, rows, D], a row being one head of one token, whatever the layout; a reshape that moves nothing. Only the first
2R channels of the rows of q and k are read and written. The angle of a row follows from its index, so nothing but the arrays, the
coordinates and the frequencies comes from memory, and the last two stay in cache.

The gradient with respect to the data is the same kernel with the sign turned and needs nothing but the rotation. The gradient with
respect to the angle of a pair (a, b) is a db - b da, where (da, db) is the gradient with respect to the pair: both are in registers in
that same pass, if the inputs were saved, which happens only where coords, freqs or theta are differentiated.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from rope_jax_kernels.rotary import device, tiling
from rope_jax_kernels.rotation import Pairing, Rotation

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Rows:
    """What rows of D channels mean, and which way they turn. Static.

    Attributes:
        tokens: L.
        heads: N.
        order: of the rows. "LN" and "NL" have a row for each token and head, "L3N" has q, k and v of all heads of a token.
        pairing: which channels turn together.
        direction: 1, or -1 to turn back.
        interpret: whether to run in interpret mode.
    """

    tokens: int
    heads: int
    order: Literal["LN", "NL", "L3N"]
    pairing: Pairing
    direction: int
    interpret: bool

    def token_and_head(self, index: Array) -> tuple[Array, Array]:
        """Token and head of the index-th row that turns."""
        inner = np.int32(self.tokens if self.order == "NL" else self.heads)
        # Not // and %, whose care for negative numbers costs instructions.
        outside, inside = jax.lax.div(index, inner), jax.lax.rem(index, inner)
        return (inside, outside) if self.order == "NL" else (outside, inside)

    def rows(self, index: Array) -> list[Array]:
        """The rows of one array that turn by the angles of the index-th: one, or those of q and k where they are packed."""
        if self.order != "L3N":
            return [index]
        q = index + 2 * self.heads * jax.lax.div(index, np.int32(self.heads))
        return [q, q + self.heads]


def tile_angles(rows: Rows, angles: tuple, token: Array, head: Array, pair: Array, inside: Array) -> Array:
    """Theta of a tile, float32, from refs of (coords, freqs) or of (theta,)."""
    head = head[:, None] if angles[-1].shape[0] > 1 else 0
    if len(angles) == 1:
        return plt.load(angles[0].at[head, token[:, None], pair[None, :]], mask=inside, other=0).astype(jnp.float32)
    coords, freqs = angles
    theta = None
    for axis in range(coords.shape[1]):
        along = plt.load(coords.at[token, axis], mask=token < rows.tokens, other=0).astype(jnp.float32)
        if freqs.shape[0] > 1:
            freq = plt.load(freqs.at[head, axis, pair[None, :]], mask=inside, other=0)
        else:
            freq = plt.load(freqs.at[0, axis, pair], mask=pair < freqs.shape[2], other=0)[None, :]
        term = along[:, None] * freq.astype(jnp.float32)
        theta = term if theta is None else theta + term
    return theta


def rotary_kernel(*refs: Any, rows: Rows, tile: tiling.Tile, pairs: int, arrays: int, angles: int, saved: int) -> None:
    """One program: a tile of rows of `tile.batch` batch items.

    Args:
        *refs: `arrays` arrays to turn, `angles` refs of (coords, freqs) or (theta,), `saved` inputs of the forward pass, then the
            outputs: the turned arrays, and with saved inputs the sums over this program's batch items of the gradient of theta.
        rows: what rows mean.
        tile: the program's share.
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
    cos, sin = jnp.cos(theta), rows.direction * jnp.sin(theta)

    if rows.pairing == "half":
        channels = [pair, pairs + pair]
        in_row = inside
    else:
        channels = [jnp.arange(2 * tile.pairs, dtype=jnp.int32)]
        in_row = (index < rows.tokens * rows.heads)[:, None] & (channels[0] < 2 * pairs)[None, :]

    def load(ref: Any, item: Array, row: Array) -> tuple[Array, Array]:
        """First and second members of the pairs of a tile."""
        # Zeros outside, so that sums over batch items need no mask of their own.
        parts = [plt.load(ref.at[item, row[:, None], c[None, :]], mask=in_row & (item < batch), other=0) for c in channels]
        return tuple(parts) if rows.pairing == "half" else jnp.unstack(parts[0].reshape(tile.rows, tile.pairs, 2), axis=2)

    def store(ref: Any, item: Array, row: Array, members: tuple[Array, Array]) -> None:
        """Writes what `load` reads, rounded once."""
        members = [x.astype(ref.dtype) for x in members]
        if rows.pairing == "interleaved":
            members = [jnp.stack(members, axis=2).reshape(tile.rows, 2 * tile.pairs)]
        for c, x in zip(channels, members, strict=True):
            plt.store(ref.at[item, row[:, None], c[None, :]], x, mask=in_row & (item < batch))

    def step(i: Array | int, dtheta: Array | None) -> Array | None:
        items = [first + i * tile.items + j for j in range(tile.items)]
        places = [(item, a, row) for item in items for a in range(arrays) for row in rows.rows(index)]
        # All loads stand before the first store: the compiler cannot know that a store does not touch what is read after it.
        loaded = [(load(sources[a], item, row), [load(ref, item, row) for ref in inputs[a : a + 1]]) for item, a, row in places]
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
        # The pass turned gradients back; the angle that it turned by has the opposite sign of the one that is differentiated.
        plt.store(ref.at[pl.program_id(1), index[:, None], pair[None, :]], -rows.direction * dtheta, mask=inside)


def launch(rows: Rows, arrays: tuple, angles: tuple, saved: tuple = (), *, in_place: bool = True) -> tuple[tuple, Array | None]:
    """Turns arrays [B, rows, D] in one launch.

    Args:
        rows: what their rows mean.
        arrays: of one shape.
        angles: (coords [L, A], freqs [N or 1, A, R]) or (theta [N or 1, L, R],).
        saved: the inputs of the forward pass, where this is a backward pass and the gradient of the angles is wanted.
        in_place: whether the results take the place of `arrays`. Without it channels that do not turn are left undefined.

    Returns:
        The turned arrays, and with `saved` the partial sums of the gradient of theta, [G, L * N, R] float32 in the rows' order.
    """
    batch, _, head_dim = arrays[0].shape
    pairs = angles[-1].shape[-1]
    itemsize = min(x.dtype.itemsize for x in arrays)
    tile = tiling.tile(batch, rows.tokens * rows.heads, pairs, head_dim, itemsize, rows.pairing)
    grid = (pl.cdiv(rows.tokens * rows.heads, tile.rows), pl.cdiv(batch, tile.batch))
    varying = jax.typeof(arrays[0]).manual_axis_type
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying) for x in arrays]
    if saved:
        shapes.append(jax.ShapeDtypeStruct((grid[1], rows.tokens * rows.heads, pairs), jnp.float32, manual_axis_type=varying))
    kernel = functools.partial(rotary_kernel, rows=rows, tile=tile, pairs=pairs, arrays=len(arrays), angles=len(angles), saved=len(saved))
    outputs = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=shapes,
        input_output_aliases={i: i for i in range(len(arrays))} if in_place else {},
        compiler_params=plt.CompilerParams(num_warps=tiling.WARPS),
        interpret=rows.interpret,
        name="rotary",
    )(*arrays, *angles, *saved)
    return tuple(outputs[: len(arrays)]), outputs[-1] if saved else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def turn(rows: Rows, arrays: tuple, angles: tuple) -> tuple:
    """`launch` with a gradient, in place."""
    return launch(rows, arrays, angles)[0]


def turn_forward(rows: Rows, arrays: tuple, angles: tuple) -> tuple[tuple, tuple]:
    """Saves the angles' few numbers, and the inputs only where the angles are differentiated."""
    values = tuple(x.value for x in arrays)
    angle_values = tuple(x.value for x in angles)
    if not any(x.perturbed for x in angles):
        # `turn` and not `launch`, here and in the backward pass: so derivatives of any order with respect to the data exist.
        return turn(rows, values, angle_values), (angle_values, ())
    # Inputs that are kept cannot be overwritten. Where all channels turn a second buffer costs nothing more; elsewhere XLA copies.
    whole = rows.order != "L3N" and 2 * angle_values[-1].shape[-1] == values[0].shape[-1]
    return launch(rows, values, angle_values, in_place=not whole)[0], (angle_values, values)


def turn_backward(rows: Rows, residuals: tuple, gradients: tuple) -> tuple[tuple, tuple | None]:
    """Turns the gradients back; with saved inputs also reduces the partial sums of the gradient of theta."""
    angles, saved = residuals
    gradients = tuple(jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g for g in gradients)
    back = dataclasses.replace(rows, direction=-rows.direction)
    if not saved:
        return turn(back, gradients, angles), None
    gradients, partial = launch(back, gradients, angles, saved)
    by_head = partial.reshape(-1, *((rows.heads, rows.tokens) if rows.order == "NL" else (rows.tokens, rows.heads)), partial.shape[-1])
    dtheta = by_head if rows.order == "NL" else by_head.swapaxes(1, 2)  # [G, N, L, R]
    shared = angles[-1].shape[0] == 1
    if len(angles) == 1:
        dtheta = dtheta.sum((0, 1), keepdims=True)[0] if shared else dtheta.sum(0)
        return gradients, (dtheta.astype(angles[0].dtype),)
    coords, freqs = (x.astype(jnp.float32) for x in angles)
    # Sums of products and not matrix products, which a GPU would be free to round to TF32.
    dtheta = dtheta.sum(0)
    dcoords = jnp.sum(dtheta[:, :, None, :] * freqs[:, None, :, :], axis=(0, 3))
    dfreqs = jnp.sum(dtheta[:, :, None, :] * coords[None, :, :, None], axis=1)
    dfreqs = dfreqs.sum(0, keepdims=True) if shared else dfreqs
    return gradients, (dcoords.astype(angles[0].dtype), dfreqs.astype(angles[1].dtype))


turn.defvjp(turn_forward, turn_backward, symbolic_zeros=True)


def vary_alike(*trees: Any) -> tuple:
    """Inside `shard_map`, marks arrays that are the same on all devices as varying over the axes over which any of the arrays varies.

    The kernel has one type for all its operands; and the transpose of this step is the sum over devices that the gradient of shared
    frequencies needs.
    """
    varying = lambda x: jax.typeof(x).manual_axis_type.varying
    axes = frozenset().union(*(varying(x) for x in jax.tree.leaves(trees)))
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(axes - varying(x)), to="varying"), trees)


def turn_all(arrays: tuple, angles: tuple, order: str, heads: int, pairing: Pairing) -> tuple:
    """Turns arrays of one shape in one launch; they come and go in the shape that their layout gives them."""
    arrays, angles = vary_alike(arrays, angles)
    shape = arrays[0].shape
    tokens = angles[0].shape[-2]
    rows = Rows(tokens, heads, order, pairing, 1, device.interpreted())
    turned = turn(rows, tuple(x.reshape(shape[0], -1, shape[-1]) for x in arrays), angles)
    return tuple(x.reshape(shape) for x in turned)


def rotate(q: Array, k: Array, rotation: Rotation, *, layout: str) -> tuple[Array, Array]:
    """See `rope_jax_kernels.rotate`. One launch where q and k have one shape, else (k has its own number of heads) two."""
    angles = (rotation.coords, rotation.freqs)
    heads = layout.index("N")
    one = lambda *arrays: turn_all(arrays, angles, layout[1:3], arrays[0].shape[heads], rotation.pairing)
    return one(q, k) if q.shape == k.shape else (*one(q), *one(k))


def rotate_qkv(qkv: Float[Array, "B L 3 N D"], rotation: Rotation) -> Float[Array, "B L 3 N D"]:
    """See `rope_jax_kernels.rotate_qkv`. Reads q and k where they lie; v is never touched."""
    return turn_all((qkv,), (rotation.coords, rotation.freqs), "L3N", qkv.shape[3], rotation.pairing)[0]


def rotate_by_angles(x: Float[Array, "B _ _ D"], theta: Float[Array, "_ L R"], *, pairing: Pairing, layout: str) -> Float[Array, "B _ _ D"]:
    """See `rope_jax_kernels.rotate_by_angles`."""
    return turn_all((x,), (theta,), layout[1:3], x.shape[layout.index("N")], pairing)[0]


def refusal(arrays: dict[str, Array], angles: dict[str, Array]) -> str | None:
    """Why this kernel cannot turn `arrays` by `angles`, both by name, or None."""
    for name, x in (arrays | angles).items():
        if x.dtype not in DTYPES:
            return f"{name} has dtype {x.dtype}, and it computes in float32 (float16, bfloat16 and float32 are served)"
        if x.size == 0:
            return f"{name} has shape {x.shape}, so there is nothing to rotate"
    return device.refusal()


def refuses_rotate(q: Array, k: Array, rotation: Rotation, *, layout: str) -> str | None:
    """Why `rotate` cannot serve this call, or None."""
    return refusal({"q": q, "k": k}, {"rotation.coords": rotation.coords, "rotation.freqs": rotation.freqs})


def refuses_rotate_qkv(qkv: Array, rotation: Rotation) -> str | None:
    """Why `rotate_qkv` cannot serve this call, or None."""
    return refusal({"qkv": qkv}, {"rotation.coords": rotation.coords, "rotation.freqs": rotation.freqs})


def refuses_rotate_by_angles(x: Array, theta: Array, *, pairing: Pairing, layout: str) -> str | None:
    """Why `rotate_by_angles` cannot serve this call, or None."""
    return refusal({"x": x}, {"theta": theta})
