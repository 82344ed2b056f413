"""Goldens of dense prediction: outputs of official code for reproducible weights and inputs.

`tests/data/dense_parity/cases.json` maps names to the settings of the golden: sizes [h, w],
channels, seeds, classes. NAME.json lists shapes and kinds of the weights, and NAME.npz
holds the outputs in float32 and, as "..._f64", in float64.

The check of a kind of goldens is a module of this package whose name begins their names: `vitdet`
for vitdet_abs and vitdet_rel. It defines

    outputs(golden, dtype)    arrays by name, as stored: NCHW, and only the stored part
    make_model(case, weights, dtype)    the model of a case, without weights, for `load`
    LIMITS                    optional: limits that differ from those below

and reads all numbers from `golden.case`.
"""

import dataclasses
import functools
import importlib
import json
import pathlib
import pkgutil

import jax
import numpy as np
from flax import nnx

import rope_jax
from tests.parity import noise as drawn
from tests.parity import official

DATA = pathlib.Path(__file__).parents[2] / "data" / "dense_parity"
LIMITS = {"float32": 5e-5, "float64": 1e-9}
"""Largest allowed difference of floating-point outputs; others must be equal."""


@dataclasses.dataclass(frozen=True)
class Golden:
    """One golden.

    Attributes:
        name: of the golden.
        case: its entry of `cases.json`.
    """

    name: str
    case: dict

    @functools.cached_property
    def metadata(self):
        """The content of NAME.json."""
        return json.loads((DATA / f"{self.name}.json").read_text())

    @property
    def weights(self):
        """Arrays by torch's names, without derived ones ("fixed") and counters."""
        return {
            key: official.tensor(key, shape, kind)
            for key, (shape, kind) in self.metadata["keys"].items()
            if kind not in ("fixed", "counter")
        }

    def outputs(self, dtype):
        """The stored outputs by name, floating-point ones in `dtype`."""
        with np.load(DATA / f"{self.name}.npz") as file:
            arrays = dict(file)
        exact = {key.removesuffix("_f64"): x for key, x in arrays.items() if key.endswith("_f64")}
        plain = {key: x for key, x in arrays.items() if key in self.metadata["arrays"]}
        return plain | exact if dtype == "float64" else plain


def goldens():
    """The goldens by name."""
    cases = json.loads((DATA / "cases.json").read_text())
    return {name: Golden(name, case) for name, case in cases.items()}


def find_check(name):
    """The module that checks goldens of this name."""
    kind = next(x.name for x in pkgutil.iter_modules(__path__) if name.startswith(x.name))
    return importlib.import_module(f"{__name__}.{kind}")


def load(golden, dtype, source):
    """The model of a golden with its weights."""
    make = find_check(golden.name).make_model
    model = nnx.eval_shape(lambda: make(golden.case, golden.weights, dtype))
    rope_jax.convert_state_dict(model, golden.weights, source=source)
    return model


def draw_maps(case, dtype):
    """The fixed maps of a case, [1, H, W, C]."""
    return [
        noise(1, channels, *size, seed=case["seed"] + i).transpose(0, 2, 3, 1).astype(dtype)
        for i, (channels, size) in enumerate(zip(case["channels"], case["maps"], strict=True))
    ]


def check_outputs(name, dtype):
    """Compares all outputs of a golden; those that are not floating-point must be equal."""
    golden, check = goldens()[name], find_check(name)
    limit, expected = (LIMITS | getattr(check, "LIMITS", {}))[dtype], golden.outputs(dtype)
    with jax.default_matmul_precision("highest"):
        outputs = {key: np.asarray(x) for key, x in check.outputs(golden, dtype).items()}
    assert outputs.keys() == expected.keys()
    for key, x in expected.items():
        floating = x.dtype.kind == "f"
        assert outputs[key].dtype == dtype or not floating, key
        assert outputs[key].shape == x.shape, key
        atol = limit if floating else 0
        np.testing.assert_allclose(outputs[key], x, rtol=0, atol=atol, err_msg=f"{name}: {key}")


def images(height, width, count=1, seed=1234):
    """Input images [B, H, W, 3], float32."""
    return noise(count, 3, height, width, seed=seed).transpose(0, 2, 3, 1)


def noise(*shape, seed):
    """Other inputs: standard normal, float32."""
    return drawn.noise(seed, shape)
