"""Scores of groups of runs by resolution, and their differences, paired by seed."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rope_jax.analysis.intervals import Estimate, newcombe, student, wilson
from rope_jax.analysis.runs import Groups, Size, rows_by_size
from rope_jax.evaluate.results import FRACTIONS, Row, main_score
from rope_jax.names.text import size_text

Estimates = Mapping[str, Mapping[Size, Estimate]]  # by group and resolution


def scores(groups: Groups) -> Estimates:
    """The main score of each group at each of its resolutions, the training resolution first."""
    return {
        name: {size: score(list(rows.values())) for size, rows in rows_by_size(group).items()}
        for name, group in groups.items()
    }


def score(rows: Sequence[Row]) -> Estimate:
    """The main score of rows at one resolution, one for each seed.

    The interval of several rows is over seeds, that of a single row over images; a mean over
    classes of a single row has none.
    """
    name = main_score(rows[0])
    mean, half = student([row[name] for row in rows])
    low, high = mean - half, mean + half
    if len(rows) == 1 and name in FRACTIONS:
        low, high = wilson(mean, rows[0]["count"])
    return Estimate(mean, *np.clip((low, high), 0, 1))


def paired_differences(groups: Groups) -> Estimates:
    """The differences of all groups from the first, at each resolution that both have.

    Runs of equal seeds are compared: they share the order of the images, their augmentation and the
    initial weights of all that is not positional. With several seeds the interval is Student's over
    these differences; with one, Newcombe's over images, which treats the two runs as independent,
    or none for scores that are not fractions of images.

    Args:
        groups: from `group_runs`.
    """
    first, *others = groups
    base, differences = rows_by_size(groups[first]), {}
    for name in others:
        rows = rows_by_size(groups[name])
        for size, base_rows in base.items():
            group_rows = rows.get(size, {})
            pairs = [
                (group_rows[seed], row) for seed, row in base_rows.items() if seed in group_rows
            ]
            if pairs:
                differences.setdefault(name, {})[size] = _difference(pairs)
    return differences


def _difference(pairs: Sequence[tuple[Row, Row]]) -> Estimate:
    row, base = pairs[0]
    name = main_score(row)
    mean, half = student([row[name] - base[name] for row, base in pairs])
    low, high = mean - half, mean + half
    if len(pairs) == 1 and name in FRACTIONS:
        low, high = newcombe(row[name], row["count"], base[name], base["count"])
    return Estimate(mean, low, high)


def table_by_size(
    estimates: Estimates, cell: Callable[[Estimate], str]
) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a row for each group, a column for each resolution.

    >>> table_by_size({"ape": {(8, 8): Estimate(0.031, 0.002, 0.06)}}, Estimate.text)
    (['position', '8x8'], [['ape', '3.1 [0.2, 6.0]']])
    """
    sizes = dict.fromkeys(size for by_size in estimates.values() for size in by_size)
    rows = [
        [name, *(cell(by_size[size]) if size in by_size else "-" for size in sizes)]
        for name, by_size in estimates.items()
    ]
    return ["position", *map(size_text, sizes)], rows
