"""What the kernels that work in place share: what their rows mean, their gradients, and the operations made of them.

Arrays are seen as [B, rows, D], a row being one head of one token, whatever the layout; a reshape that moves nothing. Only the first
2R channels of the rows of q and k are read and written. The angle of a row follows from its index, so nothing but the arrays, the
coordinates and the frequencies comes from memory, and the last two stay in cache.

The gradient with respect to the data is the same kernel with the sign turned and needs nothing but the rotation. The gradient with
respect to the angle of a pair (a, b) is a db - b da, where (da, db) is the gradient with respect to the pair: both are in registers in
that same pass, if the inputs were saved, which happens only where coords, freqs or theta are differentiated.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from rope_jax_kernels.rotary import device
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def turn(launch: Callable, rows: Rows, arrays: tuple, angles: tuple) -> tuple:
    """`launch`, see `Kernel`, with a gradient, in place."""
    return launch(rows, arrays, angles)[0]


def turn_forward(launch: Callable, rows: Rows, arrays: tuple, angles: tuple) -> tuple[tuple, tuple]:
    """Saves the angles' few numbers, and the inputs only where the angles are differentiated."""
    values = tuple(x.value for x in arrays)
    angle_values = tuple(x.value for x in angles)
    if not any(x.perturbed for x in angles):
        # `turn` and not `launch`, here and in the backward pass: so derivatives of any order with respect to the data exist.
        return turn(launch, rows, values, angle_values), (angle_values, ())
    # Inputs that are kept cannot be overwritten. Where all channels turn a second buffer costs nothing more; elsewhere XLA copies.
    whole = rows.order != "L3N" and 2 * angle_values[-1].shape[-1] == values[0].shape[-1]
    return launch(rows, values, angle_values, in_place=not whole)[0], (angle_values, values)


def turn_backward(launch: Callable, rows: Rows, residuals: tuple, gradients: tuple) -> tuple[tuple, tuple | None]:
    """Turns the gradients back; with saved inputs also reduces the partial sums of the gradient of theta."""
    angles, saved = residuals
    gradients = tuple(jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g for g in gradients)
    gradients, angles = vary_alike(gradients, angles)  # zeros made here do not vary yet
    back = dataclasses.replace(rows, direction=-rows.direction)
    if not saved:
        return turn(launch, back, gradients, angles), None
    gradients, partial = launch(back, gradients, angles, saved)
    return gradients, gradients_of_angles(rows, angles, partial)


turn.defvjp(turn_forward, turn_backward, symbolic_zeros=True)


def gradients_of_angles(rows: Rows, angles: tuple, partial: Float[Array, "G rows R"]) -> tuple:
    """The gradients of (coords, freqs) or of (theta,), from partial sums of the gradient of theta in the rows' order."""
    by_head = partial.reshape(-1, *((rows.heads, rows.tokens) if rows.order == "NL" else (rows.tokens, rows.heads)), partial.shape[-1])
    dtheta = by_head if rows.order == "NL" else by_head.swapaxes(1, 2)  # [G, N, L, R]
    shared = angles[-1].shape[0] == 1
    if len(angles) == 1:
        dtheta = dtheta.sum((0, 1), keepdims=True)[0] if shared else dtheta.sum(0)
        return (dtheta.astype(angles[0].dtype),)
    coords, freqs = (x.astype(jnp.float32) for x in angles)
    # Sums of products and not matrix products, which a GPU would be free to round to TF32.
    dtheta = dtheta.sum(0)
    dcoords = jnp.sum(dtheta[:, :, None, :] * freqs[:, None, :, :], axis=(0, 3))
    dfreqs = jnp.sum(dtheta[:, :, None, :] * coords[None, :, :, None], axis=1)
    dfreqs = dfreqs.sum(0, keepdims=True) if shared else dfreqs
    return dcoords.astype(angles[0].dtype), dfreqs.astype(angles[1].dtype)


def vary_alike(*trees: Any) -> tuple:
    """Inside `shard_map`, marks arrays that are the same on all devices as varying over the axes over which any of the arrays varies.

    The kernel has one type for all its operands; and the transpose of this step is the sum over devices that the gradient of shared
    frequencies needs.
    """
    varying = lambda x: jax.typeof(x).manual_axis_type.varying
    axes = frozenset().union(*(varying(x) for x in jax.tree.leaves(trees)))
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(axes - varying(x)), to="varying"), trees)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel in place, and the rotary operations by it: those of `rope_jax_kernels.rotary.api`, and why it refuses them.

    Attributes:
        launch: `launch(rows, arrays, angles, saved=(), *, in_place=True)` turns arrays [B, rows, D] of one shape in one launch, by
            angles (coords [L, A], freqs [N or 1, A, R]) or (theta [N or 1, L, R],). Where the gradient of the angles is wanted, `saved`
            has the inputs of the forward pass. Without `in_place`, channels that do not turn are left undefined. Returns the turned
            arrays, and with `saved` the partial sums of the gradient of theta, [G, L * N, R] float32 in the rows' order.
        refuses: `refuses(arrays, angles, pairing)` says why it cannot turn arrays by angles, both by name, of floating-point dtypes
            that `DTYPES` has and not empty; or None.
    """

    launch: Callable
    refuses: Callable[[dict[str, Array], dict[str, Array], Pairing], str | None]

    def turn_all(self, arrays: tuple, angles: tuple, order: str, heads: int, pairing: Pairing) -> tuple:
        """Turns arrays of one shape in one launch; they come and go in the shape that their layout gives them."""
        arrays, angles = vary_alike(arrays, angles)
        shape = arrays[0].shape
        tokens = angles[0].shape[-2]
        rows = Rows(tokens, heads, order, pairing, 1, device.interpreted())
        turned = turn(self.launch, rows, tuple(x.reshape(shape[0], -1, shape[-1]) for x in arrays), angles)
        return tuple(x.reshape(shape) for x in turned)

    def rotate(self, q: Array, k: Array, rotation: Rotation, *, layout: str) -> tuple[Array, Array]:
        """One launch where q and k have one shape, else (k has its own number of heads) two."""
        angles = (rotation.coords, rotation.freqs)
        heads = layout.index("N")
        one = lambda *arrays: self.turn_all(arrays, angles, layout[1:3], arrays[0].shape[heads], rotation.pairing)
        return one(q, k) if q.shape == k.shape else (*one(q), *one(k))

    def rotate_qkv(self, qkv: Float[Array, "B L 3 N D"], rotation: Rotation) -> Float[Array, "B L 3 N D"]:
        """Reads q and k where they lie; v is never touched."""
        return self.turn_all((qkv,), (rotation.coords, rotation.freqs), "L3N", qkv.shape[3], rotation.pairing)[0]

    def rotate_by_angles(
        self, x: Float[Array, "B _ _ D"], theta: Float[Array, "_ L R"], *, pairing: Pairing, layout: str
    ) -> Float[Array, "B _ _ D"]:
        """One launch."""
        return self.turn_all((x,), (theta,), layout[1:3], x.shape[layout.index("N")], pairing)[0]

    def refusal(self, arrays: dict[str, Array], angles: dict[str, Array], pairing: Pairing) -> str | None:
        """Why this kernel cannot turn `arrays` by `angles`, both by name, or None."""
        for name, x in (arrays | angles).items():
            if x.dtype not in DTYPES:
                return f"{name} has dtype {x.dtype}, and it computes in float32 (float16, bfloat16 and float32 are served)"
            if x.size == 0:
                return f"{name} has shape {x.shape}, so there is nothing to rotate"
        return self.refuses(arrays, angles, pairing)

    def refuses_rotate(self, q: Array, k: Array, rotation: Rotation, *, layout: str) -> str | None:
        """Why `rotate` cannot serve this call, or None."""
        del layout
        return self.refusal({"q": q, "k": k}, {"rotation.coords": rotation.coords, "rotation.freqs": rotation.freqs}, rotation.pairing)

    def refuses_rotate_qkv(self, qkv: Array, rotation: Rotation) -> str | None:
        """Why `rotate_qkv` cannot serve this call, or None."""
        return self.refusal({"qkv": qkv}, {"rotation.coords": rotation.coords, "rotation.freqs": rotation.freqs}, rotation.pairing)

    def refuses_rotate_by_angles(self, x: Array, theta: Array, *, pairing: Pairing, layout: str) -> str | None:
        """Why `rotate_by_angles` cannot serve this call, or None."""
        del layout
        return self.refusal({"x": x}, {"theta": theta}, pairing)
