"""Training steps compiled for an H200, compared with those of other JAX libraries.

    pip install --target build/peers --no-deps -r benchmarks/peers.txt
    PYTHONPATH=build/peers make test-aot ARGS=--peers

stores temporary memory, bytes and launches, and the memory of ours with recomputed blocks.
"""

import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import _peers
from benchmarks._gpus import H200
from benchmarks._runner import record
from tests.aot.program import compile_ahead, launches

OUT = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "peers_h200.json"
BATCH, SIZE = 256, 224
FIGURES = ["temporary memory, GiB", "GB moved", "launches"]
REMAT = ["remat=dots", "remat=blocks"]
# Name -> the options that change ViT-S to it.
MODELS = {
    "ViT-S": {},
    "ViT-B": {"width": 768, "heads": 12},
    "ViT-L": {"width": 1024, "heads": 16, "depth": 24},
}


def parse(options):
    """Options of a model, such as scan_layers=True,remat=blocks."""
    pairs = (x.split("=") for x in options.split(",") if x)
    return {name: value == "True" or value for name, value in pairs}


def compile_step(gpu, model):
    state = jax.eval_shape(functools.partial(_peers.init_state, model))
    labels = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    shapes = (state, model.images(BATCH, SIZE), labels)
    return compile_ahead(functools.partial(_peers.train, model), shapes, gpu, donate=(0,))


def measure(gpu, model):
    """Temporary memory in GiB, GB moved and launches of a training step."""
    compiled = compile_step(gpu, model)
    operations = launches(compiled.as_text())
    return (
        compiled.memory_analysis().temp_size_in_bytes / 2**30,
        sum(x.times * x.bytes for x in operations) / 1e9,
        sum(x.times for x in operations),
    )


@pytest.mark.parametrize(
    ("position", "registers"), [pytest.param("lape(ape)", 0, marks=pytest.mark.slow), ("ape", 4)]
)
def test_gradients_of_tables_do_not_make_the_batch_the_innermost_axis(position, registers, gpus):
    """See `rope_jax.positions.batch.add`."""
    model = _peers.ours(position, SIZE, jnp.dtype("bfloat16"), registers=registers)
    layouts = re.findall(r"bf16\[256,\d+,384\]\{([\d,]+)\}", compile_step(gpus[0], model).as_text())
    assert set(layouts) == {"2,1,0"}


def compare_libraries(gpu):
    """(position, library) -> figures of its step."""
    return {
        (position, name): measure(gpu, model)
        for position in _peers.POSITIONS
        for name, model in _peers.models(position, SIZE, "bfloat16", cudnn=True).items()
    }


def compare_options(gpu):
    """(model, options) -> figures of our step with a learned table."""
    cases = [(name, x) for name in MODELS for x in ("", *REMAT)]
    cases += [("ViT-S", f"scan_layers=True{x}") for x in ("", *(f",{x}" for x in REMAT))]
    ours = functools.partial(_peers.ours, "ape", SIZE, jnp.dtype("bfloat16"))
    return {
        (name, options): measure(gpu, ours(**MODELS[name], **parse(options)))
        for name, options in cases
    }


def make_table(columns, figures, note):
    rows = [
        [*(f"`{x}`" if "=" in x or x in _peers.POSITIONS else x for x in names), *texts]
        for names, (memory, moved, count) in figures.items()
        for texts in [[f"{memory:.2f}", f"{moved:.1f}", f"{count:.0f}"]]
    ]
    note = f"{note}: {BATCH} images of {SIZE} px, bfloat16, AdamW on float32 parameters."
    return {"columns": [*columns, *FIGURES], "rows": rows, "note": note}


def test_our_steps_need_less_than_those_of_peers(request, gpus):
    if not request.config.getoption("--peers"):
        pytest.skip("--peers is not given")
    assert set(_peers.versions()) == {name.lower() for name in _peers.PEERS}
    libraries, options = compare_libraries(gpus[0]), compare_options(gpus[0])
    for (position, _), theirs in libraries.items():
        ours = libraries[position, _peers.OURS]
        assert all(mine <= other for mine, other in zip(ours, theirs, strict=True))
    for name in MODELS:
        assert options[name, "remat=blocks"][0] < 0.4 * options[name, ""][0]
    tables = [
        make_table(["position", "library"], libraries, "A training step of ViT-S/16"),
        make_table(["model", "options"], options, "Our training step with `ape`"),
    ]
    machine = record("", {})["machine"] | {"device": f"{H200} (compiled for)"}
    result = record("peers_h200", {}, machine=machine, tables=tables, versions=_peers.versions())
    OUT.write_text(json.dumps(result, indent=1) + "\n")
