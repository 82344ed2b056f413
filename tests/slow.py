"""Selects the cases that run in `make test`; the others run in `make test-slow`."""

import pytest


def some_slow(cases, quick):
    """Cases as parameters; all that are not in `quick` are slow."""

    def slow(case):
        return pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)

    return [case if case in quick else slow(case) for case in cases]
