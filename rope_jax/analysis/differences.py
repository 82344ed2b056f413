"""Differences in accuracy between schemes, paired by seed."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rope_jax.analysis.intervals import newcombe, student
from rope_jax.analysis.runs import Groups, RunResults, rows_at, size_text, sizes_of
from rope_jax.evaluate.results import SHARES, Row, main_score


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference in accuracy of two groups of runs at one resolution.

    Attributes:
        name: of the group from which the base is subtracted.
        size: (height, width) in pixels.
        mean: over seeds, of differences of shares in [-1, 1].
        low, high: bounds of its 95 % confidence interval; None where there is none.
    """

    name: str
    size: tuple[int, int]
    mean: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        mean = f"{100 * self.mean:+.1f}"
        if self.low is None or self.high is None:
            return mean
        return f"{mean} [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"


def paired_differences(groups: Groups) -> list[Difference]:
    """The differences of all groups from the first, at each resolution that both have.

    Runs of equal seeds are compared: they share the order of the images, their augmentation and the
    initial weights of all that is not positional. With several seeds the interval is Student's over
    these differences; with one, Newcombe's over images, which treats the two runs as independent,
    or none for scores that are no shares of images.

    Args:
        groups: from `group_runs`.
    """
    (_, base), *others = groups.items()
    return [
        found
        for name, group in others
        for size in sizes_of(base)
        if (found := _difference(name, size, group, base)) is not None
    ]


def _difference(
    name: str, size: tuple[int, int], group: Sequence[RunResults], base: Sequence[RunResults]
) -> Difference | None:
    """None if no seed of both has the resolution."""
    own, other = _by_seed(group, size), _by_seed(base, size)
    pairs = [(own[seed], other[seed]) for seed in own if seed in other]
    if not pairs:
        return None
    score, low, high = main_score(pairs[0][0]), None, None
    values = [row[score] - base_row[score] for row, base_row in pairs]
    if len(pairs) > 1:
        low, high = student(values)
    elif score in SHARES:
        ((row, base_row),) = pairs
        low, high = newcombe(row[score], row["count"], base_row[score], base_row["count"])
    return Difference(name, size, float(np.mean(values)), low, high)


def _by_seed(group: Sequence[RunResults], size: tuple[int, int]) -> dict[int, Row]:
    return {run.config.seed: row for run in group for row in rows_at([run], size)}


def differences_table(found: Sequence[Difference]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a row for each group, a column for each resolution.

    >>> differences_table([Difference("ape", (8, 8), 0.031, 0.002, 0.06)])
    (['position', '8x8'], [['ape', '+3.1 [+0.2, +6.0]']])
    """
    sizes = list(dict.fromkeys(one.size for one in found))
    cells = {(one.name, one.size): str(one) for one in found}
    names = list(dict.fromkeys(one.name for one in found))
    rows = [[name, *(cells.get((name, size), "-") for size in sizes)] for name in names]
    return ["position", *map(size_text, sizes)], rows
