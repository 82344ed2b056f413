"""How tensors lie in files of torch and how here: one rule for each kind, read in both directions.

torch's dense weights are [out, in] and its convolutions [O, I, kh, kw]; ours are [in, out] and [kh, kw, I, O] (methods 6.1).
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from flax import nnx

from rope_jax.positions import Position
from rope_jax.positions.grids import Grid
from rope_jax.positions.relative import RelativeBias
from rope_jax.positions.rotary import Rotary
from rope_jax_kernels import Neighborhood, Window
from rope_jax_kernels.rotation import Pairing


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place in a model that takes one tensor of a file: a parameter, one layer's share of it, or a part of that.

    Attributes:
        name: "blocks.0.attn.qkv.kernel"; of a position's parameters "position.rpb.offsets.0", with scheme and layer.
        variable: the parameter.
        layer: index into the parameter's first axis, or None for all of it.
        part: see `Rule.part`.
        scheme: the positional scheme that the parameter belongs to, if any.
        rotary: the scheme that rotates queries and keys beside the parameter, if any.
        pairing: the channels that the file's rotation turns together, or None where it knows no rotation.
        grid: (rows, columns) of the map or window for which the file's table was made, where that is known.
    """

    name: str
    variable: nnx.Variable
    layer: int | None = None
    part: tuple[int, int] | None = None
    scheme: Position | None = None
    rotary: Rotary | None = None
    pairing: Pairing | None = None
    grid: Grid | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what the place takes."""
        return self.of(np.broadcast_to(np.False_, self.variable.shape)).shape

    def of(self, value: np.ndarray) -> np.ndarray:
        """The view of the place in an array of the parameter's shape."""
        value = value if self.layer is None else value[self.layer, ...]
        return value if self.part is None else np.split(value, self.part[1], axis=-1)[self.part[0]]

    @property
    def own_grid(self) -> Grid:
        """(rows, columns) of the map or window for which the model's own table is made."""
        if isinstance(self.scheme, RelativeBias):
            return _side_of_table(*self.shape[-2:])
        return self.scheme.stage.grid


@dataclasses.dataclass(frozen=True)
class Rule:
    """A layout: `load` brings a file's tensor into the model's, `save` is its inverse.

    Attributes:
        load, save: functions of an array and the slot. `load` may be given any shape that `grid` accepts, and what `grid` said of it in
            `Slot.grid`.
        grid: (rows, columns) of the map or window for which a tensor of some shape was made: the slot's where that is known, a square
            one where the shape leaves a choice, or None where it cannot be a table. Only for tables that their scheme resizes.
        part: (i, n) where the tensor is the i-th of n equal parts, along the last axis, of what the model keeps in one parameter. The
            rows of all parts follow each other in the table.
        cut: the share of the tensor's first axis that is the parameter's, where the file keeps several in one; None for all of it.
    """

    load: Callable[[np.ndarray, Slot], np.ndarray]
    save: Callable[[np.ndarray, Slot], np.ndarray]
    grid: Callable[[tuple[int, ...], Slot], Grid | None] | None = None
    part: tuple[int, int] | None = None
    cut: slice | None = None

    def cut_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the parameter's share of a tensor of some shape."""
        return shape if self.cut is None or not shape else (len(range(shape[0])[self.cut]), *shape[1:])


def rotary_of(position: Position) -> Rotary | None:
    """The part of a scheme that rotates queries and keys, if any."""
    return next((module for _, module in nnx.iter_modules(position) if isinstance(module, Rotary)), None)


def channel_order(slot: Slot) -> np.ndarray | None:
    """Where the model's outputs of a q, k, v projection stand in a file; None for the same place.

    The rotation of pairs (2r, 2r + 1) is that of pairs (r, R + r) after a permutation of the rotated channels of each head, for q and
    k alike, which leaves their products as they are.
    """
    rotary = slot.rotary
    if rotary is None or rotary.pairing == slot.pairing:
        return None
    heads, head_dim, span = rotary.stage.heads, rotary.stage.head_dim, 2 * rotary.pairs
    turned = np.arange(head_dim)
    to_half = np.arange(span).reshape(-1, 2).T.reshape(-1)  # 0, 2, 4, ..., 1, 3, 5, ...
    turned[:span] = to_half if rotary.pairing == "half" else np.argsort(to_half)
    order = np.arange(3 * heads * head_dim).reshape(3, heads, head_dim)
    order[:2] = order[:2][..., turned]
    return order.reshape(-1)


def _load_channels(x: np.ndarray, slot: Slot) -> np.ndarray:
    order = channel_order(slot)
    return x if order is None else x[..., order[: x.shape[-1]]]


def _save_channels(x: np.ndarray, slot: Slot) -> np.ndarray:
    order = channel_order(slot)
    return x if order is None else x[..., np.argsort(order[: x.shape[-1]])]


def _load_qv_bias(x: np.ndarray, slot: Slot) -> np.ndarray:
    q, _, v = np.split(x, 3)
    return np.concatenate([_load_channels(q, slot), v])


def _save_qv_bias(x: np.ndarray, slot: Slot) -> np.ndarray:
    q, v = np.split(x, 2)
    return np.concatenate([_save_channels(q, slot), np.zeros_like(q), v])


def square(tokens: int) -> Grid | None:
    """Rows and columns of a square map of so many tokens, None where there is none."""
    side = math.isqrt(max(tokens, 0))
    return (side, side) if side and side * side == tokens else None


def _grid_of_tokens(shape: tuple[int, ...], slot: Slot) -> Grid | None:
    if len(shape) != 3 or shape[0] != 1 or shape[2] != slot.shape[1]:
        return None
    count = shape[1] - slot.scheme.stage.embed_prefix
    return _of_size(count, square(count), lambda h, w: h * w, slot)


def _grid_of_flat_offsets(shape: tuple[int, ...], slot: Slot) -> Grid | None:
    if len(shape) != 2 or shape[1] != slot.shape[0]:
        return None
    side = square(shape[0])
    return _of_size(shape[0], side and _side_of_table(*side), lambda h, w: (2 * h - 1) * (2 * w - 1), slot)


def _grid_of_offsets(shape: tuple[int, ...], slot: Slot) -> Grid | None:
    if len(shape) != 3 or shape[0] != slot.shape[0]:
        return None
    sides = _side_of_table(*shape[1:])
    return sides if sides == slot.own_grid or _may_grow(slot) else None


def _of_size(count: int, guess: Grid | None, size: Callable[[int, int], int], slot: Slot) -> Grid | None:
    """The map or window whose table has `count` entries: the one that is known, or else a square one, or else the model's."""
    grids = [slot.own_grid] if not _may_grow(slot) else [slot.grid] if slot.grid else [guess, slot.own_grid]
    return next((grid for grid in grids if grid and size(*grid) == count), None)


def _side_of_table(rows: int, columns: int) -> Grid | None:
    return ((rows + 1) // 2, (columns + 1) // 2) if rows % 2 and columns % 2 else None


def _may_grow(slot: Slot) -> bool:
    """A neighbourhood has one size on every map, and so has its table."""
    return not (isinstance(slot.scheme, RelativeBias) and isinstance(slot.scheme.stage.pattern, Neighborhood))


def _query_minus_key(x: np.ndarray, slot: Slot) -> np.ndarray:
    """Between the offsets of a file, query minus key, and the model's: windows count so, everything else key minus query."""
    return x if isinstance(slot.scheme.stage.pattern, Window) else x[:, ::-1, ::-1]


def _key_minus_query(x: np.ndarray, slot: Slot) -> np.ndarray:
    return x[:, ::-1, ::-1] if isinstance(slot.scheme.stage.pattern, Window) else x


def _load_flat_offsets(x: np.ndarray, slot: Slot) -> np.ndarray:
    h, w = slot.grid or slot.own_grid
    return _query_minus_key(x.T.reshape(-1, 2 * h - 1, 2 * w - 1), slot)


def _save_flat_offsets(x: np.ndarray, slot: Slot) -> np.ndarray:
    return _query_minus_key(x, slot).reshape(len(x), -1).T


def _load_freqs(x: np.ndarray, slot: Slot) -> np.ndarray:
    """From (x, y) first, [2, N, R], to [N, (y, x), R]; with layers [2, depth, N, R] or [2, depth, N * R]."""
    x = x.reshape(2, *slot.shape[:-2], slot.shape[-1])
    return np.moveaxis(x[::-1], 0, -2)


SAME = Rule(lambda x, slot: x, lambda x, slot: x)
DENSE = Rule(lambda x, slot: x.T, lambda x, slot: x.T)
CONV = Rule(lambda x, slot: x.transpose(2, 3, 1, 0), lambda x, slot: x.transpose(3, 2, 0, 1))
DEPTHWISE = Rule(lambda x, slot: x[:, 0].transpose(1, 2, 0), lambda x, slot: x.transpose(2, 0, 1)[:, None])
"""A depthwise convolution, [C, 1, kh, kw] there and [kh, kw, C] here."""
QKV_WEIGHT = Rule(lambda x, slot: _load_channels(x.T, slot), lambda x, slot: _save_channels(x, slot).T)
QKV_BIAS = Rule(_load_channels, _save_channels)
Q_BIAS, V_BIAS = dataclasses.replace(QKV_BIAS, part=(0, 2)), dataclasses.replace(SAME, part=(1, 2))
QV_BIAS = Rule(_load_qv_bias, _save_qv_bias)
"""The bias of q, k and v, [3C], of which k's is masked: 0 whatever the file says."""
TOKENS = Rule(lambda x, slot: x[0], lambda x, slot: x[None], _grid_of_tokens)
"""An absolute embedding, [1, T, C]."""
WINDOW_OFFSETS = Rule(_load_flat_offsets, _save_flat_offsets, _grid_of_flat_offsets)
"""Swin's bias table [(2h-1)*(2w-1), N], query minus key."""
OFFSETS = Rule(_key_minus_query, _key_minus_query, _grid_of_offsets)
"""NAT's bias table [N, 2h-1, 2w-1], key minus query."""
FREQS = Rule(_load_freqs, lambda x, slot: np.moveaxis(x, -2, 0)[::-1])
"""RoPE-Mixed's frequencies [2, ..., N, R], x first: timm's for all layers, Swin's for one."""
FLAT_FREQS = Rule(_load_freqs, lambda x, slot: FREQS.save(x, slot).reshape(2, x.shape[0], -1))
"""The same with heads and pairs in one axis, [2, depth, N * R]: RoPE-ViT's."""
