"""Official models: their names in this package, reproducible weights, and official logits.

`tests/data/parity/cases.json` has repository and revision of each, and the shapes of its tensors.
Their values are reproducible noise, seeded by the tensor's name and scaled by its kind.
"""

import json
import math
import pathlib
import zlib

import numpy as np

from tests.parity.noise import noise

DATA = pathlib.Path(__file__).parents[1] / "data" / "parity"
CASES = json.loads((DATA / "cases.json").read_text())

_RULES = {
    "linear": lambda z: z / np.float32(math.sqrt(math.prod(z.shape[1:]))),
    "norm_weight": lambda z: np.float32(1) + np.float32(0.1) * z,
    "bias": lambda z: np.float32(0.1) * z,
    "layerscale": lambda z: np.float32(0.5) + np.float32(0.1) * z,
    "logit_scale": lambda z: np.float32(3) + z,
    "table": lambda z: np.float32(0.5) * z,
    "running_mean": lambda z: np.float32(0.1) * z,
    "performer_kqv": lambda z: np.float32(0.25) * z / np.float32(math.sqrt(math.prod(z.shape[1:]))),
    "performer_features": lambda z: np.float32(0.7) * z,
    "running_var": lambda z: np.float32(1) + np.float32(0.1) * np.abs(z),
}


def tensor(key, shape, kind):
    """The float32 values of one tensor, in torch's layout."""
    return _RULES[kind](noise(zlib.crc32(key.encode()), shape))


def draw(layers, others):
    """Weights by name: a weight and a bias of each layer, and others; kinds follow from names."""
    shapes = others | {f"{layer}.weight": shape for layer, shape in layers.items()}
    shapes |= {f"{layer}.bias": shape[:1] for layer, shape in layers.items()}
    kinds = {"bias": "bias", "token": "table", "norm": "norm_weight", "gamma": "layerscale"}
    kinds |= {"weight": "linear", "pos_embed": "table"}
    find_kind = lambda key: next(kind for word, kind in kinds.items() if word in key)
    return {key: tensor(key, shape, find_kind(key)) for key, shape in shapes.items()}


def assert_equal(arrays, expected):
    """Checks that two state dicts hold equal arrays."""
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name, strict=True)


def state_dict(name):
    """The weights of a case, without derived and frozen tensors ("fixed") and counters."""
    return {
        key: tensor(key, shape, kind)
        for key, (shape, kind) in CASES[name]["keys"].items()
        if kind not in ("fixed", "counter")
    }


def images(height, width):
    """The two images of a case, [2, H, W, 3]."""
    return noise(1234, (2, 3, height, width)).transpose(0, 2, 3, 1)


def golden(name):
    """The results of the official code: logits in float32 and logits_f64."""
    return np.load(DATA / f"{name}.npz")
