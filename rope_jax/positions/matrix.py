"""Schemes that multiply q and k by rotation matrices of several channels, which need not commute.

Blocks of channels are multiplied by exp(sum_a coords[a] * A_a), with learned skew-symmetric
generators A_a. If the generators of the axes commute, scores depend on differences of coordinates
only, as with pairs of channels. All computations are float32 (float64 if the stage is), and the
rotated q and k are rounded once, as in the rotary schemes.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.positions import frequencies, grids
from rope_jax.positions.grids import Grid
from rope_jax.positions.initializers import normal_init
from rope_jax.positions.rotary import whole_map
from rope_jax.positions.scheme import (
    PerLayer,
    Position,
    Scale,
    Spread,
    Stage,
    Terms,
    advice_for_heads,
    scheme,
)
from rope_jax_kernels import Rotation, rotate


@jax.custom_vjp
def expm(matrices: Float[Array, "... b b"]) -> Float[Array, "... b b"]:
    """Exponentials of skew-symmetric matrices, to a few units in the last place of their angles.

    Scaling and squaring of a Taylor series. `jax.scipy.linalg.expm` scales too little for float32:
    it is off by 0.004 at an angle of 30 radians. The gradient is the derivative at A' in the
    direction of the cotangent (Higham, Functions of Matrices, chapter 3), in forward mode, so that
    no powers are stored; `expm` itself has no forward-mode derivative.
    """
    return _powers(matrices, _squarings(matrices))


def _expm_forward(matrices: Array) -> tuple[Array, Array]:
    return expm(matrices), matrices


def _expm_backward(matrices: Array, gradient: Array) -> tuple[Array]:
    squarings = _squarings(matrices)

    def evaluate(transposed: Array) -> Array:
        return _powers(transposed, squarings)

    return jax.jvp(evaluate, (matrices.mT,), (gradient,))[1:]


expm.defvjp(_expm_forward, _expm_backward)


def _squarings(matrices: Array) -> Array:
    """The number of halvings after which no matrix rotates by more than one radian."""
    # The norm is an upper bound on the largest angle.
    norm = jnp.max(jnp.sum(jnp.abs(matrices), axis=-1), initial=0)
    return jnp.clip(jnp.ceil(jnp.log2(norm)), 0, 60).astype(jnp.int32)


def _powers(matrices: Array, squarings: Array) -> Array:
    """exp(matrices / 2**squarings), squared that often."""
    small = matrices * jnp.ldexp(matrices.dtype.type(1), -squarings)
    series = identity = jnp.eye(matrices.shape[-1], dtype=matrices.dtype)
    orders = 20 if matrices.dtype == jnp.float64 else 11  # the next 1 / order! is below rounding
    for order in range(orders, 0, -1):
        series = identity + jnp.matmul(small, series, precision="highest") / order

    def square(_: Array, power: Array) -> Array:
        return jnp.matmul(power, power, precision="highest")

    return jax.lax.fori_loop(0, squarings, square, series)


def block_rotations(
    coords: Float[Array, "L A"], generators: Float[Array, "layers N A G b b"]
) -> Float[Array, "layers L N G b b"]:
    """exp(sum_a coords[a] * generators[a]) at every token."""
    return expm(jnp.sum(coords[:, None, :, None, None, None] * generators[:, None], axis=3))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TurnBlocks:
    """A `Terms.transform` that multiplies blocks of channels of q and k by matrices.

    Attributes:
        matrices: [L, N or 1, G, b, b]; channels from G * b on do not change.
    """

    matrices: Array | PerLayer

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable) -> Array:
        return attend(self._turn(q), self._turn(k), v)

    def _turn(self, x: Array) -> Array:
        tokens, _, blocks, size, _ = self.matrices.shape
        heads, turning = x.shape[-2], blocks * size
        precise = jnp.promote_types(x.dtype, self.matrices.dtype)
        vectors = x[..., :turning].reshape(x.shape[0], tokens, heads, blocks, size).astype(precise)
        matrices = jnp.broadcast_to(self.matrices, (tokens, heads, blocks, size, size))
        turned = jnp.einsum(
            "lngij,blngj->blngi", matrices.astype(precise), vectors, precision="highest"
        )
        turned = turned.astype(x.dtype).reshape(*x.shape[:-1], turning)
        return jnp.concatenate([turned, x[..., turning:]], axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TurnInBasis:
    """A `Terms.transform` that maps q and k to another basis and rotates pairs of channels there.

    Attributes:
        basis: [N or 1, D, D]; its columns are the new basis.
        rotation: of the channels in that basis.
    """

    basis: Array | PerLayer
    rotation: Rotation

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable) -> Array:
        turned_q, turned_k = rotate(self._change(q), self._change(k), self.rotation)
        q = turned_q.astype(q.dtype).reshape(q.shape)
        k = turned_k.astype(k.dtype).reshape(k.shape)
        return attend(q, k, v)

    def _change(self, x: Array) -> Array:
        batch, *_, heads, head_dim = x.shape
        basis = jnp.broadcast_to(self.basis, (heads, head_dim, head_dim))
        precise = jnp.promote_types(x.dtype, basis.dtype)
        x = x.reshape(batch, -1, heads, head_dim).astype(precise)
        return jnp.einsum("blni,nij->blnj", x, basis.astype(precise), precision="highest")


def _skew(upper: Float[Array, "... M"], size: int) -> Float[Array, "... b b"]:
    """Skew-symmetric matrices with the entries `upper` above their diagonal, row by row."""
    rows, columns = np.triu_indices(size, 1)
    half = jnp.zeros((*upper.shape[:-1], size, size), upper.dtype).at[..., rows, columns].set(upper)
    return half - half.mT


def _count_blocks(block: int, stage: Stage, multiple: int = 1) -> int:
    """Blocks per head, a multiple of `multiple`; raises ValueError unless they fill the head."""
    head_dim = stage.head_dim
    fit = [size for size in range(2, head_dim + 1) if head_dim % (multiple * size) == 0]
    if block not in fit:
        blocks = "blocks" if multiple == 1 else "as many blocks for each axis"
        raise ValueError(
            f"block={block} does not fit head dimension {head_dim}: {blocks} must fill a head; "
            f"{advice_for_heads('block', fit)}"
        )
    return head_dim // block


@scheme("liere")
class LieRE(Position):
    """LieRE: exp(y A_y + x A_x) with learned generators that do not commute (arXiv 2406.10322).

    Each axis of a map is [0, 1] from the first patch to the last at the size of creation, and
    [0, n / n_creation] at another size n. Class and register tokens are not rotated. In windows and
    neighbourhoods, coordinates are those on the whole map.

    Options:
        block: channels per block, 8; at most the head dimension, the paper's 64.
        per_layer: whether each layer has its own generators, True.
        per_head: whether each head has its own generators, True.
    """

    paper = "Ostmeier et al., arXiv 2406.10322"
    equation = "R(p) = exp(y A_y + x A_x), A skew, learned"
    acts = "transform"
    resolution = "extrapolate"
    relative = False
    per_head = per_layer = learnable = True
    of_training = ("unit",)

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        block: int = 8,
        per_layer: bool = True,
        per_head: bool = True,
    ):
        super().__init__(stage, rngs=rngs)
        self.block, self.unit = block, stage.grid
        self.per_layer, self.per_head = per_layer, per_head
        layers, heads = stage.depth if per_layer else 1, stage.heads if per_head else 1
        blocks, entries = _count_blocks(block, stage), block * (block - 1) // 2
        shape = (layers, heads, 2, blocks, entries)
        upper = jax.random.uniform(rngs.params(), shape, stage.dtype, 0, 2 * np.pi)
        self.upper = nnx.Param(upper, decay=False)

    def coords(self, grid: Grid) -> Float[np.ndarray, "H W 2"]:
        """Coordinates of the tokens of a map."""
        steps = [n / unit / max(n - 1, 1) for n, unit in zip(grid, self.unit, strict=True)]
        return grids.absolute(grid) * steps

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        coords = whole_map(self.coords(grid), self.stage)
        matrices = block_rotations(coords, _skew(self.upper[...], self.block))
        return Terms(transform=TurnBlocks(PerLayer(matrices) if self.per_layer else matrices[0]))


@scheme("comrope")
class ComRoPE(Position):
    """ComRoPE: exp(y A_y + x A_x) with learned generators that commute (arXiv 2506.03737).

    The generators are block-diagonal, with blocks P - P'. The coordinates of a patch are its centre
    on a map that is [0, 1] along each axis; class and register tokens are at (0.5, 0.5) and are
    rotated as well.

    Options:
        variant: "ld", linearly dependent: both axes have the same blocks, each times its own
            learned factor; or "ap", axial partition: rows turn even blocks, columns odd ones.
        block: channels per block, 8.
        std: standard deviation of the initial blocks, 1. (The factors of "ld" are drawn with 1.)
        perturbation: in training (given a key) each patch is moved at random within its borders, by
            a clipped normal draw with this standard deviation, in half sides of a patch; 1.
        offset: in training all tokens are moved together, by a normal draw with this standard
            deviation, in sides of the map, 0.
    """

    paper = "Yu et al., arXiv 2506.03737"
    equation = "R(p) = exp(y A_y + x A_x), A_y A_x = A_x A_y, learned"
    acts = "transform"
    resolution = "interpolate"
    per_head = per_layer = learnable = augments = True

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        variant: Literal["ld", "ap"] = "ld",
        block: int = 8,
        std: Spread = 1.0,
        perturbation: Spread = 1.0,
        offset: Spread = 0.0,
    ):
        super().__init__(stage, rngs=rngs)
        self.variant = variant
        self.perturbation = perturbation
        self.offset = offset
        blocks = _count_blocks(block, stage, multiple=1 if variant == "ld" else 2)

        def draw(std: float, *shape: int) -> nnx.Param:
            return nnx.Param(normal_init(std)(rngs.params(), shape, stage.dtype), decay=False)

        self.blocks = draw(std, stage.depth, stage.heads, blocks, block, block)
        if variant == "ld":
            self.scales = draw(1.0, stage.depth, 1, 2, blocks)  # the same in all heads
        self.augments = self.perturbation > 0 or self.offset > 0

    def _coords(self, grid: Grid, key: Array | None) -> Float[Array, "L 2"]:
        prefix = np.full((self.stage.prefix, 2), 0.5)
        coords = whole_map((grids.absolute(grid) + 0.5) / grid, self.stage, prefix)
        if key is None:
            return coords
        patch_key, offset_key = jax.random.split(key)
        patches = jax.random.normal(patch_key, (grid[0] * grid[1], 2), coords.dtype)
        patches = jnp.clip(patches * self.perturbation / 2, -0.5, 0.5)
        patches = patches / jnp.asarray(grid, coords.dtype)
        offset = jax.random.normal(offset_key, (1, 2), coords.dtype) * self.offset
        return coords.at[self.stage.prefix :].add(patches) + offset

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        blocks = self.blocks[...]
        if self.variant == "ld":
            scales = self.scales[...]
        else:
            mask = np.arange(blocks.shape[2]) % 2 == np.arange(2)[:, None]
            scales = jnp.asarray(mask, blocks.dtype)
        generators = scales[..., None, None] * (blocks - blocks.mT)[:, :, None]
        matrices = block_rotations(self._coords(grid, key), generators)
        return Terms(transform=TurnBlocks(PerLayer(matrices)))


@scheme("string")
class String(Position):
    """STRING: 2-D RoPE on row and column in a learned basis, P RoPE P' (arXiv 2502.02562).

    q and k are mapped to the basis and rotated there; scores do not need the inverse map. Each head
    of each layer has its own basis.

    Options:
        variant: "cayley", P = (I - S) (I + S)^-1 with S learned and skew-symmetric, and the
            frequencies of 2-D RoPE; or "circulant", exp(y (C_y - C_y') + x (C_x - C_x')) with
            learned circulant matrices C: the basis is Fourier's, and C determines the frequencies.
        base: of the frequencies of "cayley", 100.
        std: standard deviation of the initial parameters, 0.02.
    """

    paper = "Schenck et al., arXiv 2502.02562"
    equation = "R(p) = P RoPE(p) P', P orthogonal, learned"
    acts = "transform"
    resolution = "extrapolate"
    per_head = per_layer = learnable = True

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        variant: Literal["cayley", "circulant"] = "cayley",
        base: Scale = 100.0,
        std: Spread = 0.02,
    ):
        super().__init__(stage, rngs=rngs)
        self.variant = variant
        head_dim = stage.head_dim
        if head_dim % 4:
            raise ValueError(
                f"head dimension {head_dim} must be divisible by 4: change the model's width or "
                "number of heads"
            )
        self.base = base
        entries = (head_dim * (head_dim - 1) // 2,) if variant == "cayley" else (2, head_dim)
        init = normal_init(std)
        learned = init(rngs.params(), (stage.depth, stage.heads, *entries), stage.dtype)
        self.learned = nnx.Param(learned, decay=False)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        basis, freqs = self._cayley() if self.variant == "cayley" else self._circulant()
        coords = whole_map(grids.absolute(grid), self.stage)
        return Terms(transform=TurnInBasis(basis, Rotation(coords, freqs)))

    def _cayley(self) -> tuple[PerLayer, Array]:
        head_dim, dtype = self.stage.head_dim, self.stage.dtype
        skew, identity = _skew(self.learned[...], head_dim), jnp.eye(head_dim, dtype=dtype)
        freqs = frequencies.two_axes(frequencies.ladder(head_dim // 4, self.base), "xy")
        return PerLayer(jnp.linalg.solve(identity + skew, identity - skew)), jnp.asarray(
            freqs, dtype
        )

    def _circulant(self) -> tuple[Array, PerLayer]:
        head_dim, dtype = self.stage.head_dim, self.stage.dtype
        place, wave = np.arange(head_dim), np.arange(1, head_dim // 2)
        angles = 2 * np.pi * place[:, None] * wave / head_dim
        # The constant and the fastest wave are not rotated.
        still = np.stack([np.ones(head_dim), (-1.0) ** place], axis=1) / np.sqrt(2)
        waves = [np.cos(angles), still[:, :1], np.sin(angles), still[:, 1:]]
        basis = np.concatenate(waves, axis=1) * np.sqrt(2 / head_dim)
        turns = jnp.asarray(np.pad(2 * np.sin(angles), ((0, 0), (0, 1))), dtype)
        freqs = jnp.einsum("lnam,mr->lnar", self.learned[...], turns, precision="highest")
        return jnp.asarray(basis[None], dtype), PerLayer(freqs)


@scheme("spherical_rope")
class SphericalRope(Position):
    """Spherical RoPE: groups of three channels, turned about two axes (arXiv 2511.08368).

    The column turns channels (0, 1) of a group, then the row turns channels (1, 2), with the same
    frequency; the two do not commute, and this order and these axes are a choice of ours. The
    remaining channels, class and register tokens do not turn. In windows and neighbourhoods a
    token's place is that on the whole map.

    Options:
        base: of the frequencies base**(-i / groups), 100.
        learnable: whether each axis, head and layer learns its own, starting with these; False.
    """

    paper = "van de Geijn et al., arXiv 2511.08368"
    equation = "R(p) = R_12(f y) R_01(f x) in groups of three channels"
    acts = "transform"
    resolution = "extrapolate"
    relative = False

    def __init__(
        self, stage: Stage, *, rngs: nnx.Rngs, base: Scale = 100.0, learnable: bool = False
    ):
        super().__init__(stage, rngs=rngs)
        if stage.head_dim < 3:
            raise ValueError(
                f"head dimension {stage.head_dim} has no group of three channels: use wider heads"
            )
        self.base, self.learnable = base, learnable
        if learnable:
            self.per_head = self.per_layer = True
            self.freqs = nnx.Param(self._ladder(stage.depth, stage.heads), decay=False)

    def _ladder(self, layers: int, heads: int) -> Float[Array, "layers heads two groups"]:
        """The frequencies of rows and columns, equal in all layers and heads."""
        ladder = frequencies.ladder(self.stage.head_dim // 3, self.base)
        return jnp.asarray(np.tile(ladder, (layers, heads, 2, 1)), self.stage.dtype)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        coords = whole_map(grids.absolute(grid), self.stage)
        freqs = self.freqs[...] if self.learnable else self._ladder(1, 1)
        row, column = (coords[:, axis, None, None] * freqs[:, None, :, axis] for axis in (0, 1))
        (cos_y, sin_y), (cos_x, sin_x) = ((jnp.cos(x), jnp.sin(x)) for x in (row, column))
        entries = [  # of R_12(row) R_01(column), [layers, L, N or 1, groups] each
            *(cos_x, -sin_x, jnp.zeros_like(cos_x)),
            *(cos_y * sin_x, cos_y * cos_x, -sin_y),
            *(sin_y * sin_x, sin_y * cos_x, cos_y),
        ]
        matrices = jnp.stack(entries, axis=-1).reshape(*row.shape, 3, 3)
        return Terms(transform=TurnBlocks(PerLayer(matrices) if self.learnable else matrices[0]))
