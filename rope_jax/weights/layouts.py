"""Layouts of tensors in torch's files and here: one rule per kind, for both directions.

torch's linear weights are [out, in] and its convolutions [O, I, kh, kw]; ours are [in, out] and
[kh, kw, I, O].
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.models.layers import STORED
from rope_jax.positions import Position
from rope_jax.positions.grids import Grid
from rope_jax.positions.relative import RelativeBias
from rope_jax.positions.rotary import Rotary
from rope_jax_kernels import Neighborhood
from rope_jax_kernels.rotation import Pairing


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place in a model for one tensor of a file: a parameter, one layer of it, or a part of that.

    Attributes:
        name: "blocks.0.attn.qkv.kernel"; of a scheme's parameters "position.rpb.offsets.0", with
            the scheme's name and the layer.
        path: of the parameter in the model's state.
        full_shape: shape of the parameter.
        layer: index into the parameter's first axis, or None for all of it.
        part: see `Rule.part`.
        scheme: the positional scheme that the parameter belongs to, if any.
        place: path of the parameter in that scheme.
        rotary: the scheme that rotates queries and keys of the same blocks, if any.
        pairing: channels that the file's rotation pairs, or None where it has no rotation.
        grid: (rows, columns) of the map or window of the file's table, where known.
    """

    name: str
    path: tuple[str | int, ...]
    full_shape: tuple[int, ...]
    layer: int | None = None
    part: tuple[int, int] | None = None
    scheme: Position | None = None
    place: tuple[str | int, ...] = ()
    rotary: Rotary | None = None
    pairing: Pairing | None = None
    grid: Grid | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the place."""
        return self.view(np.broadcast_to(np.False_, self.full_shape)).shape

    def view(self, value: np.ndarray) -> np.ndarray:
        """Returns the slot's view of an array of the parameter's shape."""
        value = value if self.layer is None else value[self.layer, ...]
        return value if self.part is None else np.split(value, self.part[1], axis=-1)[self.part[0]]

    @property
    def model_grid(self) -> Grid:
        """(rows, columns) of the map or window of the model's own table."""
        if isinstance(self.scheme, RelativeBias) and self.place == ("offsets",):
            return _sides_of_table(*self.shape[-2:])
        return self.scheme.stage.grid

    def resize(self, table: np.ndarray | jax.Array) -> jax.Array:
        """Resizes a table of the map `grid` to the model's by its scheme's rule."""
        # A copy of the scheme as if it had been created for the file's map.
        scheme = nnx.clone(self.scheme)
        variables = dict(nnx.to_flat_state(nnx.state(scheme, STORED)))
        for variable in variables.values():
            variable.set_value(jnp.zeros(variable.shape, variable.dtype))
        scheme.resize(self.grid)
        layered = self.layer is not None
        variables[self.place].set_value(jnp.asarray(table[None] if layered else table))
        scheme.resize(self.scheme.stage.grid)
        resized = variables[self.place][...]
        return resized[0] if layered else resized


@dataclasses.dataclass(frozen=True)
class Rule:
    """A layout.

    Attributes:
        read: converts a file's array to the model's layout, a function of the array and the slot.
            It accepts any shape that `grid` accepts, whose result is then in `Slot.grid`.
        write: the inverse.
        grid: for tables that their scheme resizes, a function of a tensor's shape and the slot. It
            returns (rows, columns) of the tensor's map or window: the slot's where that is known, a
            square where the shape leaves a choice, or None where the tensor cannot be a table.
        part: (i, n) for a tensor that is the i-th of n equal parts, along the last axis, of one
            parameter. The rows of all parts follow each other in a name table.
        cut: the parameter's part of the tensor's first axis, where the tensor holds several
            parameters; None for all of it.
    """

    read: Callable[[np.ndarray, Slot], np.ndarray]
    write: Callable[[np.ndarray, Slot], np.ndarray]
    grid: Callable[[tuple[int, ...], Slot], Grid | None] | None = None
    part: tuple[int, int] | None = None
    cut: slice | None = None

    def cut_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the parameter's part of a tensor of `shape`."""
        if self.cut is None or not shape:
            return shape
        return len(range(shape[0])[self.cut]), *shape[1:]


def find_rotary(position: Position) -> Rotary | None:
    """Finds the part of a scheme that rotates queries and keys, if any."""
    modules = (module for _, module in nnx.iter_modules(position))
    return next((module for module in modules if isinstance(module, Rotary)), None)


def _channel_order(slot: Slot) -> np.ndarray | None:
    """Index in a file of each of the model's q, k, v channels; None for the same order.

    Rotating pairs (2r, 2r + 1) is rotating pairs (r, R + r) after permuting the rotated channels of
    each head, of q and k alike, which does not change their products.
    """
    rotary = slot.rotary
    if rotary is None or rotary.pairing == slot.pairing:
        return None
    heads, head_dim, rotated = rotary.stage.heads, rotary.stage.head_dim, 2 * rotary.pairs
    order = np.arange(head_dim)
    to_half = np.arange(rotated).reshape(-1, 2).T.reshape(-1)  # 0, 2, 4, ..., 1, 3, 5, ...
    order[:rotated] = to_half if rotary.pairing == "half" else np.argsort(to_half)
    channels = np.arange(3 * heads * head_dim).reshape(3, heads, head_dim)
    channels[:2] = channels[:2][..., order]
    return channels.reshape(-1)


def _read_channels(x: np.ndarray, slot: Slot) -> np.ndarray:
    order = _channel_order(slot)
    return x if order is None else x[..., order[: x.shape[-1]]]


def _write_channels(x: np.ndarray, slot: Slot) -> np.ndarray:
    order = _channel_order(slot)
    return x if order is None else x[..., np.argsort(order[: x.shape[-1]])]


def _read_qv_bias(x: np.ndarray, slot: Slot) -> np.ndarray:
    q, _, v = np.split(x, 3)
    return np.concatenate([_read_channels(q, slot), v])


def _write_qv_bias(x: np.ndarray, slot: Slot) -> np.ndarray:
    q, v = np.split(x, 2)
    return np.concatenate([_write_channels(q, slot), np.zeros_like(q), v])


def square(tokens: int) -> Grid | None:
    """Rows and columns of a square map of `tokens` tokens, or None."""
    side = math.isqrt(max(tokens, 0))
    return (side, side) if side and side * side == tokens else None


def _read_tokens(x: np.ndarray, slot: Slot) -> np.ndarray:
    if slot.scheme.stage.prefix:
        return x[0]
    height, width = slot.grid or slot.model_grid  # without the entry of a class token
    return x[0, -height * width :]


def _grid_of_tokens(shape: tuple[int, ...], slot: Slot) -> Grid | None:
    if len(shape) != 3 or shape[0] != 1 or shape[2] != slot.shape[1]:
        return None
    count = shape[1] - slot.scheme.stage.embed_prefix
    candidates = [slot.grid] if slot.grid else [square(count), slot.model_grid]
    counts = (count,) if slot.scheme.stage.prefix else (count, count - 1)
    if not slot.grid:
        candidates.append(square(count - 1))
    return next((g for n in counts for g in candidates if g and g[0] * g[1] == n), None)


def _grid_of_patch_tokens(shape: tuple[int, ...], slot: Slot) -> Grid | None:
    if len(shape) != 3 or shape[1] < 2:
        return None
    return _grid_of_tokens((shape[0], shape[1] - 1, shape[2]), slot)


def _has_fixed_size(slot: Slot) -> bool:
    """True if the table has the same size on every map, as for a neighbourhood."""
    bias = isinstance(slot.scheme, RelativeBias)
    return bias and isinstance(slot.scheme.stage.pattern, Neighborhood)


def _sides_of_table(rows: int, columns: int) -> Grid | None:
    return ((rows + 1) // 2, (columns + 1) // 2) if rows % 2 and columns % 2 else None


def _grid_of_flat_offsets(shape: tuple[int, ...], slot: Slot) -> Grid | None:
    if len(shape) != 2 or shape[1] != slot.shape[0]:
        return None
    side = square(shape[0])
    candidates = [slot.grid] if slot.grid else [side and _sides_of_table(*side), slot.model_grid]
    if _has_fixed_size(slot):
        candidates = [slot.model_grid]
    counts = ((grid, (2 * grid[0] - 1) * (2 * grid[1] - 1)) for grid in candidates if grid)
    return next((grid for grid, count in counts if count == shape[0]), None)


def _grid_of_offsets(shape: tuple[int, ...], slot: Slot) -> Grid | None:
    if len(shape) != 3 or shape[0] != slot.shape[0]:
        return None
    sides = _sides_of_table(*shape[1:])
    return None if _has_fixed_size(slot) and sides != slot.model_grid else sides


def _query_minus_key(x: np.ndarray, slot: Slot) -> np.ndarray:
    """Converts the model's table to query minus key, or back."""
    return x if slot.scheme.query_first else x[:, ::-1, ::-1]


def _key_minus_query(x: np.ndarray, slot: Slot) -> np.ndarray:
    return x[:, ::-1, ::-1] if slot.scheme.query_first else x


def _read_flat_offsets(x: np.ndarray, slot: Slot) -> np.ndarray:
    h, w = slot.grid or slot.model_grid
    return _query_minus_key(x.T.reshape(-1, 2 * h - 1, 2 * w - 1), slot)


def _read_freqs(x: np.ndarray, slot: Slot) -> np.ndarray:
    """From [2, N, R], x first, to [N, (y, x), R]; with layers [2, depth, N, R] or flattened."""
    x = x.reshape(2, *slot.shape[:-2], slot.shape[-1])
    return np.moveaxis(x[::-1], 0, -2)


def _write_freqs(x: np.ndarray, slot: Slot) -> np.ndarray:
    return np.moveaxis(x, -2, 0)[::-1]


def _axes(*order: int) -> Rule:
    """The layout of tensors with other axes in files: axis i here is axis `order[i]` there."""
    back = np.argsort(order)
    return Rule(lambda x, slot: x.transpose(order), lambda x, slot: x.transpose(back))


SAME = Rule(lambda x, slot: x, lambda x, slot: x)
DENSE = _axes(1, 0)
CONV = _axes(2, 3, 1, 0)
POINTWISE = Rule(lambda x, slot: x[:, :, 0, 0].T, lambda x, slot: x.T[:, :, None, None])
"""A 1 x 1 convolution, [O, I, 1, 1], which is a linear layer here."""
PER_HEAD = Rule(lambda x, slot: x[:, 0, 0], lambda x, slot: x[:, None, None])
"""A number per head, [N, 1, 1] in files."""
FIRST = Rule(lambda x, slot: x[0], lambda x, slot: x[None])
"""A tensor with a leading axis of length 1 in files."""
DECONV = _axes(2, 3, 0, 1)
"""A transposed convolution, [I, O, kh, kw] in files and [kh, kw, I, O] here."""
DEPTHWISE = Rule(
    lambda x, slot: x[:, 0].transpose(1, 2, 0), lambda x, slot: x.transpose(2, 0, 1)[:, None]
)
"""A depthwise convolution, [C, 1, kh, kw] in files and [kh, kw, C] here."""
QKV_WEIGHT = Rule(
    lambda x, slot: _read_channels(x.T, slot), lambda x, slot: _write_channels(x, slot).T
)
QKV_BIAS = Rule(_read_channels, _write_channels)
Q_BIAS, V_BIAS = dataclasses.replace(QKV_BIAS, part=(0, 2)), dataclasses.replace(SAME, part=(1, 2))
QV_BIAS = Rule(_read_qv_bias, _write_qv_bias)
"""The bias of q, k and v, [3C], of which k's is ignored and written as 0."""
TOKENS = Rule(_read_tokens, FIRST.write, _grid_of_tokens)
"""An absolute embedding, [1, T, C]."""
PATCH_TOKENS = Rule(
    lambda x, slot: x[0, 1:],
    lambda x, slot: np.concatenate([np.zeros_like(x[:1]), x])[None],
    _grid_of_patch_tokens,
)
"""`TOKENS` of a backbone without class token, in a file with an entry for it, written as 0."""
WINDOW_OFFSETS = Rule(
    _read_flat_offsets,
    lambda x, slot: _query_minus_key(x, slot).reshape(len(x), -1).T,
    _grid_of_flat_offsets,
)
"""Swin's bias table [(2h-1)*(2w-1), N], query minus key."""
OFFSETS = Rule(_key_minus_query, _key_minus_query, _grid_of_offsets)
"""NAT's bias table [N, 2h-1, 2w-1], key minus query."""
FREQS = Rule(_read_freqs, _write_freqs)
"""RoPE-Mixed's frequencies [2, ..., N, R], x first: timm's for all layers, Swin's for one."""
FLAT_FREQS = Rule(_read_freqs, lambda x, slot: _write_freqs(x, slot).reshape(2, x.shape[0], -1))
"""`FREQS` with heads and pairs in one axis, [2, depth, N * R]: RoPE-ViT's."""
