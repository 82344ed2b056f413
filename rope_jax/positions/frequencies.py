"""Frequency ladders of rotary schemes and their layout over heads, axes and pairs, in float64."""

from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Float


def deal(heads: int, pairs: int) -> Float[np.ndarray, "N M"]:
    """Distributes a ladder of heads * pairs equal steps in [0, 1) round-robin over the heads.

    Each head spans the whole ladder at stride `heads`, with its own small offset (HDiT
    `AxialRoPE`; the saw-tooth of the thesis' figure C.1). Heads that share their frequencies count
    as one head.

    >>> deal(2, 2).tolist()
    [[0.0, 0.5], [0.25, 0.75]]
    """
    return np.arange(heads * pairs).reshape(pairs, heads).T / (heads * pairs)


def decay(rungs: Float[np.ndarray, "N M"], base: float) -> Float[np.ndarray, "N M"]:
    """Exponential decay base**-rung: from 1 down towards 1 / base (RoFormer).

    >>> decay(deal(1, 2), 100.0).tolist()
    [[1.0, 0.1]]
    """
    return base**-rungs


def ladder(pairs: int, base: float) -> Float[np.ndarray, "1 M"]:
    """The ladder base**(-i / pairs) shared by all heads (RoFormer; base 100 in 2-D RoPE).

    >>> ladder(2, 100.0).tolist()
    [[1.0, 0.1]]
    """
    return decay(deal(1, pairs), base)


# The "bounded logarithmic" ladder of the thesis in its three forms, and two others: radians at
# coordinate 1 of rungs in [0, 1).
AXIAL_GENERATORS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    # pi .. 10 pi: HDiT's code, which the thesis follows, and its section 3.3.
    "hdit": lambda rungs: np.pi * 10**rungs,
    # 1 .. 10: equation 3.5 of the thesis.
    "eq35": lambda rungs: 10**rungs,
    # 1 .. 13.96: table 3.1 of the thesis.
    "table31": lambda rungs: np.pi ** (rungs * np.log(10)),
    # 1 .. 1/100: the ladder of 2-D RoPE.
    "exponential": lambda rungs: decay(rungs, 100.0),
    # pi .. 5 pi in equal steps, both included: `freqs_for="pixel"` of lucidrains'
    # rotary-embedding-torch, with its max_freq of 10.
    "pixel": lambda rungs: np.pi * (1 + 4 * rungs * rungs.size / max(rungs.size - 1, 1)),
}


def nyquist(rungs: np.ndarray, step: float) -> np.ndarray:
    """pi .. pi / step, at most 10 pi: between patches a step apart no pair turns by more than pi.

    A faster pair aliases: on that map it equals a slower one (the sampling theorem).

    >>> (nyquist(deal(1, 2), 2 / 8) / np.pi).tolist()  # 8 patches in [-1, 1]
    [[1.0, 2.0]]
    """
    return np.pi / max(step, 1) * (1 / min(max(step, 0.1), 1)) ** rungs


def two_axes(
    ladder: Float[np.ndarray, "N M"], axis_order: str, *, alternate: bool = False
) -> Float[np.ndarray, "N 2 R"]:
    """Uses a ladder once per axis, R = 2M; axis 0 of the result's pairs is y, axis 1 is x.

    >>> two_axes(ladder(2, 100.0), "yx").tolist()
    [[[1.0, 0.1, 0.0, 0.0], [0.0, 0.0, 1.0, 0.1]]]

    Args:
        ladder: radians per unit of coordinate.
        axis_order: "yx" or "xy"; the first axis turns the first M pairs, the second the others.
        alternate: the axes alternate between pairs instead.
    """
    heads, rungs = ladder.shape
    freqs = np.zeros((heads, 2, 2 * rungs))
    for place, axis in enumerate(axis_order):
        pairs = slice(place, None, 2) if alternate else slice(place * rungs, (place + 1) * rungs)
        freqs[:, "yx".index(axis), pairs] = ladder
    return freqs
