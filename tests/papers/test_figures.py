"""Figures of maps: the tokens that they are about."""

import numpy as np

import rope_jax
from rope_jax.papers.figures import correlation_maps, fourier_maps
from rope_jax.runs.loading import LoadedModel
from rope_jax.weights import Preprocessing


def test_maps_are_about_the_tokens_at_the_places():
    options = {"position": "rope_mixed+ape", "depth": 2, "width": 16, "heads": 2}
    model = rope_jax.create_model("vit_digits", **options)
    about = ("vit_digits", "rope_mixed+ape", (8, 8), Preprocessing(), None, "initial")
    loaded = LoadedModel(model, lambda: model, *about)  # 4 x 4 tokens
    points = fourier_maps(loaded, [(0.5, 0.5), (1.0, 0.0)])
    assert [np.unravel_index(x.argmax(), x.shape) for x in points.values()] == [(1, 1), (3, 0)]
    assert list(points) == ["token (1, 1)", "token (3, 0)"]
    layers = correlation_maps(loaded, [(0.0, 1.0)])
    assert [x.argmax() for x in layers.values()] == [3, 3]
