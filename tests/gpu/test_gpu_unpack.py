"""Splitting and packing the projection on a GPU: the checks of interpreted kernels."""

import dataclasses

import pytest

from tests.kernels import test_unpack as interpreted
from tests.kernels.rotary_cases import MODEL_CASES

pytestmark = pytest.mark.gpu
MODELS = [dataclasses.replace(case, layout="BLND") for case in MODEL_CASES]


@pytest.mark.parametrize("case", interpreted.CASES + MODELS, ids=str)
def test_unpacking_equals_rotating_the_parts(case):
    interpreted.test_unpacking_equals_rotating_the_parts_bit_for_bit(case)


@pytest.mark.parametrize("case", interpreted.CASES + MODELS[:2], ids=str)
def test_gradients(case):
    interpreted.test_gradients(case)
