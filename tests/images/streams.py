"""Comparison of streams of batches."""

import itertools

import numpy as np


def take(count, stream):
    return list(itertools.islice(stream, count))


def assert_same(results, expected):
    """Checks that two lists of batches are equal."""
    for result, reference in zip(results, expected, strict=True):
        assert result.keys() == reference.keys()
        for name in result:
            np.testing.assert_array_equal(result[name], reference[name])


def join_batches(parts):
    """Joins several batches into one."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
