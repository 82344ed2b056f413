"""The rotary kernels on a GPU: the cases that the CPU interprets, and layers of models."""

import pytest

from tests.kernels import rotary_cases as cases

pytestmark = pytest.mark.gpu


HEAD_DIMS = [
    cases.Case(batch=3, tokens=53, head_dim=n, pairs=n // 4, dtype="bfloat16")
    for n in (16, 24, 96, 128)
]
ALL = cases.CASES + cases.MODEL_CASES + HEAD_DIMS


def each_implementation(some):
    """Parametrizes cases with each implementation that serves them."""
    pairs = [
        (name, case) for name in ("triton", "mosaic") for case in some if cases.serves(name, case)
    ]
    return pytest.mark.parametrize(("implementation", "case"), pairs, ids=str)


@each_implementation(ALL)
def test_values(implementation, case):
    cases.check_forward(case, implementation)


@each_implementation([case for case in ALL if case.layout == "BLND"])
def test_packed_equals_separate(implementation, case):
    cases.check_packed(case, implementation)


@pytest.mark.parametrize("theta_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", cases.CASES + cases.MODEL_CASES[:1], ids=str)
def test_explicit_angles(case, theta_dtype):
    cases.check_by_angles(case, "triton", theta_dtype)


@each_implementation(ALL)
def test_gradients(implementation, case):
    cases.check_gradients(case, implementation)
