"""Static arguments of the attention kernels: the problem, and its division into tiles."""

import dataclasses

import numpy as np
from jaxtyping import Array, Float

from rope_jax_kernels import device
from rope_jax_kernels.attention.patterns import Neighborhood, Pattern
from rope_jax_kernels.attention.slots import Tiles
from rope_jax_kernels.dispatch import TileSizes
from rope_jax_kernels.rotation import Pairing, Rotation


@dataclasses.dataclass(frozen=True)
class Task:
    """One attention problem. Static.

    Attributes:
        pattern: which tokens attend to which.
        places: shape of the tokens of one example, (L,) or (H, W).
        heads, head_dim: N and D.
        packed: whether q, k and v are one array [B, T, 3 * N, D] or three [B, T, N, D].
        pairs: R, 0 without rotation.
        pairing: which channels turn together.
        scale: of the logits.
        interpret: whether to run in interpret mode.
        biased: whether there is a bias.
        tile: measured sizes of the kernels' tiles by part (`plans.plan`); () for the planned ones.
    """

    pattern: Pattern
    places: tuple[int, ...]
    heads: int
    head_dim: int
    packed: bool
    pairs: int
    pairing: Pairing
    scale: float
    interpret: bool
    biased: bool = False
    tile: TileSizes = ()

    @property
    def tokens(self) -> int:
        """Number of tokens of one example, T."""
        return int(np.prod(self.places))

    def offsets(self) -> tuple[int, int, int]:
        """First heads of q, k and v."""
        return (0, self.heads, 2 * self.heads) if self.packed else (0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A task, its tiles, and the programs of a kernel. Static.

    Attributes:
        task, tiles: what is computed.
        warps, stages: of a program; with 2 stages or more, it loads what the next round of its
            loop needs while it computes.
        each: examples of a program, one after another; what they have in common, such as the
            tokens of slots, is computed once.
    """

    task: Task
    tiles: Tiles
    warps: int
    stages: int = 1
    each: int = 1

    def grid(self, batch: int) -> tuple[int, int, int]:
        """Programs: heads, tiles, and groups of examples.

        Those that run together touch neighbouring memory, because heads run fastest.
        """
        return self.task.heads, self.tiles.tiles, -(-batch // self.each)

    @property
    def closed(self) -> bool:
        """True if a tile holds all queries that attend to its keys."""
        return (
            not isinstance(self.task.pattern, Neighborhood)
            and self.tiles.tiles == self.tiles.repeats
        )


def make_task(
    arrays: tuple,
    *,
    pattern: Pattern,
    rotation: Rotation | None,
    bias: Float[Array, "N ..."] | None,
    scale: float | None,
    tile: TileSizes = (),
) -> Task:
    """Describes the attention of (qkv,) or (q, k, v)."""
    packed = len(arrays) == 1
    heads, head_dim = arrays[0].shape[-2:]
    return Task(
        pattern=pattern,
        places=arrays[0].shape[1 : -3 if packed else -2],
        heads=heads,
        head_dim=head_dim,
        packed=packed,
        pairs=0 if rotation is None else rotation.freqs.shape[2],
        pairing="half" if rotation is None else rotation.pairing,
        biased=bias is not None,
        scale=head_dim**-0.5 if scale is None else float(scale),
        interpret=device.is_interpreted(),
        tile=tile,
    )
