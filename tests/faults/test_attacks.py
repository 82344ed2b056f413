"""One try of every attack; `make test-faults` makes more, with other random numbers."""

import numpy as np
import pytest

from tests.faults.attacks import Absent, all_attacks

pytestmark = pytest.mark.process


def cases():
    for one in all_attacks():
        yield pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.slow else [])


@pytest.mark.parametrize("attack", list(cases()))
def test_a_run_survives(attack, tmp_path):
    try:
        attack.run(tmp_path, 0, np.random.default_rng(0))
    except Absent as absent:
        pytest.skip(str(absent))
