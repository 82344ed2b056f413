"""The common base of the rotary kernels: the meaning of rows, gradients, operations in place.

Arrays are viewed as [B, rows, D], a row being one head of one token in any layout; this reshape
moves no data. Only the first 2R channels of the rows of q and k are read and written. The angle of
a row follows from its index, so only the arrays, the coordinates and the frequencies are read from
memory, and the last two stay in cache.

The gradient with respect to the data is the same kernel with the opposite sign and needs only the
rotation. The gradient with respect to the angle of a pair (a, b) is a db - b da, where (da, db) is
the gradient with respect to the pair. Both are in registers in that pass if the inputs were saved,
which happens only if coords, freqs or theta are differentiated.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rope_jax_kernels import device
from rope_jax_kernels.arithmetic import divide
from rope_jax_kernels.device import vary_alike, without_symbolic_zeros
from rope_jax_kernels.dispatch import TileSizes
from rope_jax_kernels.rotation import Pairing, Rotation


@dataclasses.dataclass(frozen=True)
class Rows:
    """The meaning of rows of D channels, and the direction in which they turn. Static.

    Attributes:
        tokens: L.
        heads: N.
        order: of the rows. "LN" and "NL" have a row for each token and head, "L3N" has q, k and v
            of all heads of a token.
        pairing: which channels turn together.
        direction: 1, or -1 to turn back.
        interpret: whether to run in interpret mode.
        padding: tokens of zeros after the last one, of q, k and v apart (see `unpack`).
        tile: measured sizes of the kernel's tile; () for the planned ones.
    """

    tokens: int
    heads: int
    order: Literal["LN", "NL", "L3N"]
    pairing: Pairing
    direction: int = 1
    interpret: bool = dataclasses.field(default_factory=device.is_interpreted)
    padding: int = 0
    tile: TileSizes = ()

    def token_and_head(self, index: Int[Array, "*n"]) -> tuple[Array, Array]:
        """Token and head of the index-th row that turns."""
        inner = self.tokens if self.order == "NL" else self.heads
        outside, inside = divide(index, inner)
        return (inside, outside) if self.order == "NL" else (outside, inside)

    def rows(self, index: Int[Array, "*n"]) -> list[Int[Array, "*n"]]:
        """The rows that turn by the angles of the index-th: one, or those of packed q and k."""
        if self.order != "L3N":
            return [index]
        q = index + 2 * self.heads * divide(index, self.heads)[0]
        return [q, q + self.heads]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The rotary operations by a kernel, differentiable.

    Attributes:
        launch: `launch(rows, arrays, angles, saved=(), *, in_place=True)` turns arrays [B, rows, D]
            of one shape in one launch, by angles (coords [L, A], freqs [N or 1, A, R]) or
            (theta [N or 1, L, R],). Where the angles need a gradient, `saved` has the
            inputs of the forward pass. Without `in_place`, channels that do not turn are left
            undefined. Returns the turned arrays, and with `saved` the partial sums of the gradient
            of theta, [G, L * N, R] float32 in the rows' order (otherwise None).
        back: `back(rows, gradients, angles)` turns gradients back instead of `launch`, where the
            angles need no gradient; None for `launch`.
    """

    launch: Callable
    back: Callable | None = None

    def turn_all(self, rows: Rows, arrays: tuple, angles: tuple) -> tuple:
        """Turns arrays of one shape, in any layout, in one launch; returns them as rows."""
        arrays, angles = vary_alike(arrays, angles)
        as_rows = tuple(x.reshape(x.shape[0], -1, x.shape[-1]) for x in arrays)
        return turn(self, rows, as_rows, angles)

    def rotate(
        self,
        q: Float[Array, "B _ _ D"],
        k: Float[Array, "B _ _ D"],
        rotation: Rotation,
        *,
        layout: str,
        tile: TileSizes = (),
    ) -> tuple[Float[Array, "B _ _ D"], Float[Array, "B _ _ D"]]:
        """One launch if q and k have the same shape, two if k has another number of heads."""

        def turn_some(*arrays: Array) -> tuple:
            heads = arrays[0].shape[layout.index("N")]
            rows = Rows(len(rotation.coords), heads, layout[1:3], rotation.pairing, tile=tile)
            turned = self.turn_all(rows, arrays, (rotation.coords, rotation.freqs))
            return tuple(x.reshape(arrays[0].shape) for x in turned)

        return turn_some(q, k) if q.shape == k.shape else (*turn_some(q), *turn_some(k))

    def rotate_qkv(
        self, qkv: Float[Array, "B L 3 N D"], rotation: Rotation, *, tile: TileSizes = ()
    ) -> Float[Array, "B L 3 N D"]:
        """Turns q and k inside the packed projection; v is not touched."""
        rows = Rows(qkv.shape[1], qkv.shape[3], "L3N", rotation.pairing, tile=tile)
        return self.turn_all(rows, (qkv,), (rotation.coords, rotation.freqs))[0].reshape(qkv.shape)

    def rotate_by_angles(
        self,
        x: Float[Array, "B _ _ D"],
        theta: Float[Array, "_ L R"],
        *,
        pairing: Pairing,
        layout: str,
        tile: TileSizes = (),
    ) -> Float[Array, "B _ _ D"]:
        """One launch."""
        heads = x.shape[layout.index("N")]
        rows = Rows(theta.shape[1], heads, layout[1:3], pairing, tile=tile)
        return self.turn_all(rows, (x,), (theta,))[0].reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def turn(kernel: Kernel, rows: Rows, arrays: tuple, angles: tuple) -> tuple:
    """`Kernel.launch`, differentiable."""
    return kernel.launch(rows, arrays, angles)[0]


def turn_forward(kernel: Kernel, rows: Rows, arrays: tuple, angles: tuple) -> tuple[tuple, tuple]:
    """Saves the angles, and the inputs only if the angles are differentiated."""
    values = tuple(x.value for x in arrays)
    angle_values = tuple(x.value for x in angles)
    if not any(x.perturbed for x in angles):
        # `turn` and not `launch`, here and in the backward pass, so that derivatives of any order
        # with respect to the data exist.
        return turn(kernel, rows, values, angle_values), (angle_values, ())
    # Saved inputs cannot be overwritten. If all channels turn, a second buffer costs nothing more;
    # otherwise XLA copies.
    all_turn = rows.order != "L3N" and 2 * angle_values[-1].shape[-1] == values[0].shape[-1]
    turned, _ = kernel.launch(rows, values, angle_values, in_place=not all_turn)
    return turned, (angle_values, values)


def turn_backward(
    kernel: Kernel, rows: Rows, residuals: tuple, gradients: tuple
) -> tuple[tuple, tuple | None]:
    """Turns the gradients back; with saved inputs also sums the gradient of the angles."""
    angles, saved = residuals
    gradients = without_symbolic_zeros(gradients)
    gradients, angles = vary_alike(gradients, angles)  # new zeros do not vary yet
    back = dataclasses.replace(rows, direction=-rows.direction)
    if not saved:
        turn_back = kernel.back or functools.partial(turn, kernel)
        return turn_back(back, gradients, angles), None
    gradients, partial = kernel.launch(back, gradients, angles, saved)
    return gradients, gradients_of_angles(rows, angles, partial)


turn.defvjp(turn_forward, turn_backward, symbolic_zeros=True)


def gradients_of_angles(rows: Rows, angles: tuple, partial: Float[Array, "G rows R"]) -> tuple:
    """Gradients of (coords, freqs) or of (theta,).

    Args:
        rows: meaning of the rows.
        angles: (coords, freqs) or (theta,).
        partial: partial sums of the gradient of theta, in the order of `rows`.
    """
    is_head_first = rows.order == "NL"
    order = (rows.heads, rows.tokens) if is_head_first else (rows.tokens, rows.heads)
    by_head = partial.reshape(-1, *order, partial.shape[-1])
    dtheta = by_head if is_head_first else by_head.swapaxes(1, 2)  # [G, N, L, R]
    shared = angles[-1].shape[0] == 1
    if len(angles) == 1:
        dtheta = dtheta.sum((0, 1), keepdims=True)[0] if shared else dtheta.sum(0)
        return (dtheta.astype(angles[0].dtype),)
    coords, freqs = (x.astype(jnp.float32) for x in angles)
    # Sums of products, because a GPU may round matrix products to TF32.
    dtheta = dtheta.sum(0)
    dcoords = jnp.sum(dtheta[:, :, None, :] * freqs[:, None, :, :], axis=(0, 3))
    dfreqs = jnp.sum(dtheta[:, :, None, :] * coords[None, :, :, None], axis=1)
    dfreqs = dfreqs.sum(0, keepdims=True) if shared else dfreqs
    return dcoords.astype(angles[0].dtype), dfreqs.astype(angles[1].dtype)


def angle_arrays(rotation: Rotation | None, theta: Array | None = None) -> dict[str, Any]:
    """The arrays that describe the angles, by the names that error messages use."""
    if rotation is None:
        return {"theta": theta}
    return {"rotation.coords": rotation.coords, "rotation.freqs": rotation.freqs}
