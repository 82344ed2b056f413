"""The noise of the goldens does not depend on the C library."""

import numpy as np
import pytest

from tests.parity import noise


def test_noise_does_not_depend_on_the_c_library(monkeypatch):
    shape = (2, 3, 224, 224)
    drawn = noise.noise(1234, shape)
    assert (np.abs(drawn) > noise.FAR).sum() > 50  # one in 4,000 comes from the C library

    class Other:
        """A C library whose last bit differs, as in glibc from 2.41."""

        def __init__(self, seed):
            self.of = np.random.Generator(np.random.PCG64(seed))

        def standard_normal(self, shape, dtype):
            values = self.of.standard_normal(shape, dtype=dtype)
            beyond = np.abs(values) > noise.FAR
            return np.where(beyond, np.nextafter(values, np.float32(0)), values)

    monkeypatch.setattr(np.random, "default_rng", Other)
    np.testing.assert_array_equal(noise.noise(1234, shape), drawn)


def test_unrecorded_noise_names_the_command():
    with pytest.raises(ValueError, match=r"python -m tests\.parity\.noise 987654:20000"):
        noise.noise(987654, (100, 200))
