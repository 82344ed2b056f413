"""Comparison of streams of batches."""

import itertools

import numpy as np


def take(count, stream):
    return list(itertools.islice(stream, count))


def same(left, right):
    """Checks that two lists of batches are equal."""
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def joined(parts):
    """One batch of several."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
