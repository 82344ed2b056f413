"""What needs no compiler for a GPU; the counts are in tests/aot/test_aot_unpack.py."""

import jax
import numpy as np
import pytest

from benchmarks import _program, model_path
from benchmarks._program import Operation
from rope_jax_kernels import Rotation


def test_all_forms_compute_the_same(monkeypatch):
    monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")
    keys = jax.random.split(jax.random.key(0), 3)
    qkv, coords, freqs = (jax.random.normal(key, shape) for key, shape in zip(keys, ((1, 4, 3, 2, 8), (4, 2), (2, 2, 3)), strict=True))
    results = {form: f(qkv, Rotation(coords, freqs)) for form, f in model_path.FORMS.items()}
    for form in ("in_place", "unpack", "unpack_pack"):
        for x, expected in zip(results[form], results["xla"], strict=True):
            np.testing.assert_allclose(x, expected, atol=1e-6)
    np.testing.assert_array_equal(results["none"][0], qkv[:, :, 0])


UNIT = model_path.UNIT
TRITON = "__gpu$xla.gpu.triton"


@pytest.mark.parametrize(
    ("operation", "units"),
    [
        (Operation("fusion", (2 * UNIT, 64), (UNIT,), in_place=False), 3),
        (Operation(TRITON, (3 * UNIT,), (3 * UNIT,), in_place=True), 2),  # q and k, half of each, read and written
        (Operation(TRITON, (3 * UNIT,), (UNIT, UNIT, UNIT), in_place=False), 6),
        (Operation(TRITON, (UNIT, UNIT, UNIT), (3 * UNIT,), in_place=False), 6),
        (Operation(TRITON, (UNIT, UNIT, UNIT, 3 * UNIT), (3 * UNIT,), in_place=False), 7),  # and what it kept of q and k, half of each
        (Operation(TRITON, (UNIT, UNIT, UNIT, UNIT), (UNIT, UNIT), in_place=True), 3),
    ],
)
def test_units(operation, units):
    assert model_path.moved_bytes(operation, pairs=16) == pytest.approx(units * UNIT, abs=64)


def test_without_a_gpu_it_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    with pytest.raises(RuntimeError, match="there is no GPU; to compile for one set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1"):
        _program.absent_gpus()
