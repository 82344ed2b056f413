"""One try of every attack; `make test-faults` makes more, with other random numbers."""

import numpy as np
import pytest

from tests.faults.attacks import Absent, all_attacks

pytestmark = pytest.mark.process


def cases():
    for candidate in all_attacks():
        yield pytest.param(
            candidate, id=candidate.name, marks=[pytest.mark.slow] if candidate.slow else []
        )


@pytest.mark.parametrize("attack", list(cases()))
def test_runs_survive(attack, tmp_path):
    try:
        attack.run(tmp_path, 0, np.random.default_rng(0))
    except Absent as absent:
        pytest.skip(str(absent))
