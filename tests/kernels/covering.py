"""Selects the cases that run in `make test`; the others run in `make test-slow`."""

import pytest


def covering(cases, keep):
    """The cases as parameters; those that are not in `keep` are marked slow."""
    return [case if case in keep else pytest.param(case, marks=pytest.mark.slow) for case in cases]
