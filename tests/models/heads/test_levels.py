import jax
import numpy as np

from rope_jax.models.heads.dino.levels import padding_mask


def test_padding_follows_the_nearest_pixel():
    """Masks are interpolated as by torch: token i of n is pixel floor(i N / n) of N."""
    image, extent = (40, 64), np.array([[40, 64], [23, 40]])
    run = jax.jit(padding_mask, static_argnums=(1, 2))
    for size in ((5, 8), (3, 4), (2, 2)):
        rows, columns = (np.arange(n) * side // n for n, side in zip(size, image, strict=True))
        heights, widths = extent[:, :, None, None].swapaxes(0, 1)
        expected = (rows[:, None] >= heights) | (columns >= widths)
        np.testing.assert_array_equal(run(extent, image, size), expected)
