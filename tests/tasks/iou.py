"""Scores of segmentation by their definition."""

import numpy as np
import pytest


def assert_scores(row, predicted, true, classes):
    """Compares scores with those of the predicted and the true classes of all pixels of a set."""
    valid = true != 255
    predicted, true = predicted[valid], true[valid]
    pairs = [(predicted == number, true == number) for number in range(classes)]
    iou = [(a & b).sum() / (a | b).sum() if (a | b).any() else None for a, b in pairs]
    assert row["iou"] == pytest.approx(iou, abs=1e-12)
    assert row["miou"] == pytest.approx(np.mean([x for x in iou if x is not None]), abs=1e-12)
    assert row["accuracy"] == pytest.approx((predicted == true).mean(), abs=1e-12)
