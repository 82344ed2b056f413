"""Schemes that turn q and k by matrices: rotations of several channels at once, which need not commute.

Blocks of channels are multiplied by exp(sum_a coords[a] * A_a), with skew-symmetric generators A_a that are learned. Where those of the
axes commute, scores depend on differences of coordinates only, as with pairs of channels. All of it is float32 (float64 when the stage
is), and the turned q and k are rounded once, like rotated ones.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rope_jax.initializers import normal_init
from rope_jax.positions import frequencies, grids
from rope_jax.positions.grids import Grid
from rope_jax.positions.rotary import whole_map
from rope_jax.positions.scheme import PerLayer, Position, Stage, Terms, check_finite, check_option, scheme
from rope_jax_kernels import Rotation, rotate


@jax.custom_vjp
def expm(matrices: Float[Array, "... b b"]) -> Float[Array, "... b b"]:
    """Exponentials of skew-symmetric matrices, to a few units in the last place of their largest angle.

    Scaling and squaring of a Taylor series. `jax.scipy.linalg.expm` scales too little for float32: it is off by 0.004 at an angle of
    30 radians. The gradient is the derivative at A' in the direction of what arrives (Higham, Functions of Matrices, chapter 3),
    in forward mode, so that no power is kept for it; there is no forward-mode derivative of `expm` itself.
    """
    return _powers(matrices, _squarings(matrices))


def _expm_forward(matrices: Array) -> tuple[Array, Array]:
    return expm(matrices), matrices


def _expm_backward(matrices: Array, gradient: Array) -> tuple[Array]:
    squarings = _squarings(matrices)
    return jax.jvp(lambda transposed: _powers(transposed, squarings), (matrices.mT,), (gradient,))[1:]


expm.defvjp(_expm_forward, _expm_backward)


def _squarings(matrices: Array) -> Array:
    """How often all of the matrices must be halved so that none turns by more than one radian."""
    largest = jnp.max(jnp.sum(jnp.abs(matrices), axis=-1), initial=0)  # a norm, and so no less than the largest angle
    return jnp.clip(jnp.ceil(jnp.log2(largest)), 0, 60).astype(jnp.int32)


def _powers(matrices: Array, squarings: Array) -> Array:
    """exp(matrices / 2**squarings), squared that often."""
    product = lambda a, b: jnp.matmul(a, b, precision="highest")
    small, one = matrices * jnp.ldexp(matrices.dtype.type(1), -squarings), jnp.eye(matrices.shape[-1], dtype=matrices.dtype)
    series = one
    for order in range(20 if matrices.dtype == jnp.float64 else 11, 0, -1):  # 1 / order! is then below rounding
        series = one + product(small, series) / order
    return jax.lax.fori_loop(0, squarings, lambda _, power: product(power, power), series)


def block_rotations(coords: Float[Array, "L A"], generators: Float[Array, "layers N A G b b"]) -> Float[Array, "layers L N G b b"]:
    """exp(sum_a coords[a] * generators[a]) at every token."""
    return expm(jnp.sum(coords[:, None, :, None, None, None] * generators[:, None], axis=3))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TurnBlocks:
    """A transform that multiplies blocks of channels of q and k by `matrices` [L, N or 1, G, b, b]; channels from G b on stay."""

    matrices: Array | PerLayer

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable) -> Array:
        """See `Terms.transform`."""
        return attend(self._turn(q), self._turn(k), v)

    def _turn(self, x: Array) -> Array:
        tokens, _, blocks, size, _ = self.matrices.shape
        heads, turning = x.shape[-2], blocks * size
        vectors = x[..., :turning].reshape(x.shape[0], tokens, heads, blocks, size)
        matrices = jnp.broadcast_to(self.matrices, (tokens, heads, blocks, size, size))
        precise = jnp.promote_types(x.dtype, matrices.dtype)
        turned = jnp.einsum("lngij,blngj->blngi", matrices.astype(precise), vectors.astype(precise), precision="highest")
        turned = turned.astype(x.dtype).reshape(*x.shape[:-1], turning)
        return jnp.concatenate([turned, x[..., turning:]], axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TurnInBasis:
    """A transform that takes q and k to another basis, the columns of `basis` [N or 1, D, D], and rotates pairs of channels there."""

    basis: Array | PerLayer
    rotation: Rotation

    def __call__(self, q: Array, k: Array, v: Array, attend: Callable) -> Array:
        """See `Terms.transform`."""
        turned = rotate(self._change(q), self._change(k), self.rotation)
        return attend(*[new.astype(old.dtype).reshape(old.shape) for new, old in zip(turned, (q, k), strict=True)], v)

    def _change(self, x: Array) -> Array:
        batch, *_, heads, head_dim = x.shape
        basis = jnp.broadcast_to(self.basis, (heads, head_dim, head_dim))
        precise = jnp.promote_types(x.dtype, basis.dtype)
        x = x.reshape(batch, -1, heads, head_dim).astype(precise)
        return jnp.einsum("blni,nij->blnj", x, basis.astype(precise), precision="highest")


def _skew(upper: Float[Array, "... M"], size: int) -> Float[Array, "... b b"]:
    """The skew-symmetric matrices with the numbers `upper` above their diagonal, row by row."""
    rows, columns = np.triu_indices(size, 1)
    half = jnp.zeros((*upper.shape[:-1], size, size), upper.dtype).at[..., rows, columns].set(upper)
    return half - half.mT


def _check_block(block: int, stage: Stage, multiple: int = 1) -> int:
    """Returns how many blocks a head has; refuses sizes that do not fit, where their number must be a multiple of `multiple`."""
    fit = [size for size in range(2, stage.head_dim + 1) if stage.head_dim % (multiple * size) == 0]
    if block not in fit:
        advice = f"use block of {' or '.join(map(str, fit))}, or" if fit else "use"
        what = "blocks" if multiple == 1 else "as many blocks for each axis"
        raise ValueError(
            f"block={block} does not go with head dimension {stage.head_dim}: {what} must fill a head; {advice} a model with another width "
            "or number of heads"
        )
    return stage.head_dim // block


@scheme("liere")
class LieRE(Position):
    """LieRE: exp(y A_y + x A_x) with learned generators, which do not commute (arXiv 2406.10322).

    A map of the size of creation is [0, 1] from its first patch to its last; one of another size is n / n_creation long. Class and
    register tokens are not turned. In windows and neighbourhoods a token's place is that on the whole map.

    Options:
        block: channels that turn together, 8; at most the head dimension, the paper's 64.
        per_layer, per_head: whether each has generators of its own, True.
    """

    paper = "Ostmeier et al., arXiv 2406.10322"
    equation = "R(p) = exp(y A_y + x A_x), A skew, learned"
    resolution = "extrapolate"
    relative = False
    per_head = per_layer = learnable = True

    acts = "transform"

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, block: int = 8, per_layer: bool = True, per_head: bool = True):
        super().__init__(stage, rngs=rngs)
        blocks = _check_block(block, stage)
        self.block, self.per_layer, self.per_head, self.unit = block, per_layer, per_head, stage.grid
        shape = (stage.depth if per_layer else 1, stage.heads if per_head else 1, 2, blocks, block * (block - 1) // 2)
        self.upper = nnx.Param(jax.random.uniform(rngs.params(), shape, stage.dtype, 0, 2 * np.pi), decay=False)

    def coords(self, grid: Grid) -> np.ndarray:
        """Coordinates [H, W, 2] of the tokens of a map."""
        steps = [n / unit / max(n - 1, 1) for n, unit in zip(grid, self.unit, strict=True)]
        return grids.absolute(grid) * steps

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        matrices = block_rotations(whole_map(self.coords(grid), self.stage), _skew(self.upper[...], self.block))
        return Terms(transform=TurnBlocks(PerLayer(matrices) if self.per_layer else matrices[0]))


@scheme("comrope")
class ComRoPE(Position):
    """ComRoPE: exp(y A_y + x A_x) with learned generators that commute (arXiv 2506.03737).

    The generators are block-diagonal, with blocks P - P'. A patch lies at its centre on a map that is [0, 1] along each axis, and class
    and register tokens at (0.5, 0.5), where they are turned as well.

    Options:
        variant: "ld", linearly dependent: both axes have the same blocks, each times a learned number of its own; or "ap", axial
            partition: rows turn even blocks, columns odd ones.
        block: channels that turn together, 8.
        std: of the blocks at the start, normal draws, 1. (The numbers of "ld" start as normal draws of 1.)
        perturbation: in training (where there is a key) each patch is moved at random within itself, by a normal draw of this many half
            sides, cut off at its border; 1.
        offset: in training all tokens are moved together, by a normal draw of this many sides of the map, 0.
    """

    paper = "Yu et al., arXiv 2506.03737"
    equation = "R(p) = exp(y A_y + x A_x), A_y A_x = A_x A_y, learned"
    resolution = "interpolate"
    per_head = per_layer = learnable = augments = True

    acts = "transform"

    def __init__(
        self,
        stage: Stage,
        *,
        rngs: nnx.Rngs,
        variant: str = "ld",
        block: int = 8,
        std: float = 1.0,
        perturbation: float = 1.0,
        offset: float = 0.0,
    ):
        super().__init__(stage, rngs=rngs)
        check_option("variant", variant, ("ld", "ap"))
        self.variant = variant
        self.perturbation = check_finite("perturbation", perturbation, zero=True)
        self.offset = check_finite("offset", offset, zero=True)
        blocks = _check_block(block, stage, multiple=1 if variant == "ld" else 2)
        draw = lambda std, *shape: nnx.Param(normal_init(std)(rngs.params(), shape, stage.dtype), decay=False)
        self.blocks = draw(check_finite("std", std, zero=True), stage.depth, stage.heads, blocks, block, block)
        if variant == "ld":
            self.scales = draw(1.0, stage.depth, 1, 2, blocks)  # the same in all heads
        self.augments = self.perturbation > 0 or self.offset > 0

    def _coords(self, grid: Grid, key: Array | None) -> Array:
        coords = whole_map((grids.absolute(grid) + 0.5) / grid, self.stage, np.full((self.stage.prefix, 2), 0.5))
        if key is None:
            return coords
        perturb, offset = jax.random.split(key)
        normal = lambda key, rows: jax.random.normal(key, (rows, 2), coords.dtype)
        patches = jnp.clip(normal(perturb, grid[0] * grid[1]) * self.perturbation / 2, -0.5, 0.5) / jnp.asarray(grid, coords.dtype)
        return coords.at[self.stage.prefix :].add(patches) + normal(offset, 1) * self.offset

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        blocks = self.blocks[...]
        if self.variant == "ld":
            scales = self.scales[...]
        else:
            scales = jnp.asarray(np.arange(blocks.shape[2]) % 2 == np.arange(2)[:, None], blocks.dtype)
        generators = scales[..., None, None] * (blocks - blocks.mT)[:, :, None]
        return Terms(transform=TurnBlocks(PerLayer(block_rotations(self._coords(grid, key), generators))))


@scheme("string")
class String(Position):
    """STRING: 2-D RoPE on row and column in a learned basis, P RoPE P' (Schenck et al., arXiv 2502.02562).

    q and k are taken to the basis and rotated there; scores do not need the way back. The basis is one of each head and layer.

    Options:
        variant: "cayley", P = (I - S) (I + S)^-1 with S learned and skew-symmetric, and the frequencies of 2-D RoPE; or "circulant",
            exp(y (C_y - C_y') + x (C_x - C_x')) with learned circulant matrices C: the basis is Fourier's, and the frequencies follow.
        base: of the frequencies of "cayley", 100.
        std: of the learned numbers at the start, 0.02.
    """

    paper = "Schenck et al., arXiv 2502.02562"
    equation = "R(p) = P RoPE(p) P', P orthogonal, learned"
    resolution = "extrapolate"
    per_head = per_layer = learnable = True

    acts = "transform"

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, variant: str = "cayley", base: float = 100.0, std: float = 0.02):
        super().__init__(stage, rngs=rngs)
        check_option("variant", variant, ("cayley", "circulant"))
        if stage.head_dim % 4:
            raise ValueError(f"head dimension {stage.head_dim} must be divisible by 4: change the model's width or number of heads")
        self.variant, self.base = variant, check_finite("base", base)
        size = (stage.head_dim * (stage.head_dim - 1) // 2,) if variant == "cayley" else (2, stage.head_dim)
        draw = normal_init(check_finite("std", std, zero=True))
        self.learned = nnx.Param(draw(rngs.params(), (stage.depth, stage.heads, *size), stage.dtype), decay=False)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        basis, freqs = self._cayley() if self.variant == "cayley" else self._circulant()
        return Terms(transform=TurnInBasis(basis, Rotation(whole_map(grids.absolute(grid), self.stage), freqs)))

    def _cayley(self) -> tuple[PerLayer, Array]:
        head_dim, dtype = self.stage.head_dim, self.stage.dtype
        skew, one = _skew(self.learned[...], head_dim), jnp.eye(head_dim, dtype=dtype)
        ladder = frequencies.decay(frequencies.deal(1, head_dim // 4), self.base)
        return PerLayer(jnp.linalg.solve(one + skew, one - skew)), jnp.asarray(frequencies.two_axes(ladder, "xy"), dtype)

    def _circulant(self) -> tuple[Array, PerLayer]:
        head_dim, dtype = self.stage.head_dim, self.stage.dtype
        place, wave = np.arange(head_dim), np.arange(1, head_dim // 2)
        angles = 2 * np.pi * place[:, None] * wave / head_dim
        still = np.stack([np.ones(head_dim), (-1.0) ** place], axis=1) / np.sqrt(2)  # the constant and the fastest wave do not turn
        basis = np.concatenate([np.cos(angles), still[:, :1], np.sin(angles), still[:, 1:]], axis=1) * np.sqrt(2 / head_dim)
        turns = np.pad(2 * np.sin(angles), ((0, 0), (0, 1)))
        freqs = jnp.einsum("lnam,mr->lnar", self.learned[...], jnp.asarray(turns, dtype), precision="highest")
        return jnp.asarray(basis[None], dtype), PerLayer(freqs)


@scheme("spherical_rope")
class SphericalRope(Position):
    """Spherical RoPE: groups of three channels on a sphere, turned by column and by row about two axes (arXiv 2511.08368).

    The column turns channels (0, 1) of a group, then the row channels (1, 2), by the same frequency; the two do not commute, and this
    order and these axes are a choice of ours. Channels left over stay, and so do class and register tokens. In windows and
    neighbourhoods a token's place is that on the whole map.

    Options:
        base: of the frequencies base**(-i / groups), 100.
        learnable: whether each axis, head and layer learns its own, starting with these; False.
    """

    paper = "van de Geijn et al., arXiv 2511.08368"
    equation = "R(p) = R_12(f y) R_01(f x) in groups of three channels"
    resolution = "extrapolate"
    relative = False

    acts = "transform"

    def __init__(self, stage: Stage, *, rngs: nnx.Rngs, base: float = 100.0, learnable: bool = False):
        super().__init__(stage, rngs=rngs)
        if stage.head_dim < 3:
            raise ValueError(f"head dimension {stage.head_dim} has no group of three channels: use wider heads")
        self.base, self.learnable = check_finite("base", base), learnable
        if learnable:
            self.per_head = self.per_layer = True
            ladder = jnp.asarray(self._ladder(), stage.dtype)
            self.freqs = nnx.Param(jnp.tile(ladder, (stage.depth, stage.heads, 2, 1)), decay=False)  # [depth, N, (y, x), groups]

    def _ladder(self) -> np.ndarray:
        return frequencies.decay(frequencies.deal(1, self.stage.head_dim // 3)[0], self.base)

    def terms(self, grid: Grid, key: Array | None = None) -> Terms:
        """See `Position.terms`."""
        coords = whole_map(grids.absolute(grid), self.stage)
        freqs = self.freqs[...] if self.learnable else jnp.asarray(np.tile(self._ladder(), (1, 1, 2, 1)), coords.dtype)
        row, column = (coords[:, axis, None, None] * freqs[:, None, :, axis] for axis in (0, 1))  # [layers, L, N or 1, groups]
        one, none = jnp.ones_like(row), jnp.zeros_like(row)
        matrix = lambda *entries: jnp.stack(entries, axis=-1).reshape(*row.shape, 3, 3)
        of_row = matrix(one, none, none, none, jnp.cos(row), -jnp.sin(row), none, jnp.sin(row), jnp.cos(row))
        of_column = matrix(jnp.cos(column), -jnp.sin(column), none, jnp.sin(column), jnp.cos(column), none, none, none, one)
        matrices = jnp.matmul(of_row, of_column, precision="highest")
        return Terms(transform=TurnBlocks(PerLayer(matrices) if self.learnable else matrices[0]))
