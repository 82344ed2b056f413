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
COLUMNS = ["position", "library", "options", "temporary memory, GiB", "GB moved", "launches"]
REMAT = ["remat=dots", "remat=blocks"]
# Name -> the options that change ViT-S to it.
LARGER = {
    "ViT-B": {"width": 768, "heads": 12},
    "ViT-L": {"width": 1024, "heads": 16, "depth": 24},
}


def parse(option):
    """An option of a model, such as scan_layers=True."""
    return {k: v == "True" if v in ("True", "False") else v for k, _, v in [option.partition("=")]}


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


def row(*names, figures):
    memory, moved, count = figures
    return [*names, f"{memory:.2f}", f"{moved:.1f}", str(count)]


@pytest.mark.parametrize(
    ("position", "registers"), [pytest.param("lape(ape)", 0, marks=pytest.mark.slow), ("ape", 4)]
)
def test_gradients_of_tables_do_not_make_the_batch_the_innermost_axis(position, registers, gpus):
    """See `rope_jax.positions.batch.add`."""
    model = _peers.ours(position, SIZE, jnp.dtype("bfloat16"), registers=registers)
    layouts = re.findall(r"bf16\[256,\d+,384\]\{([\d,]+)\}", compile_step(gpus[0], model).as_text())
    assert set(layouts) == {"2,1,0"}


def test_our_steps_need_less_than_those_of_peers(request, gpus):
    if not request.config.getoption("--peers"):
        pytest.skip("--peers is not given")
    dtype, peers, larger = jnp.dtype("bfloat16"), [], []
    measured = {}
    for position in _peers.POSITIONS:
        for name, model in _peers.models(position, SIZE, "bfloat16").items():
            measured[name, position] = measure(gpus[0], model)
            peers.append(row(f"`{position}`", name, "", figures=measured[name, position]))
    for name, sizes in {"ViT-S": {}, **LARGER}.items():
        for option in ("", "scan_layers=True") if name == "ViT-S" else ("",):
            for remat in ("", *REMAT):
                chosen = [x for x in (option, remat) if x]
                options = functools.reduce(dict.__or__, map(parse, chosen), sizes)
                figures = measure(gpus[0], _peers.ours("ape", SIZE, dtype, **options))
                measured[name, *chosen] = figures
                larger.append(row(name, ", ".join(f"`{x}`" for x in chosen), figures=figures))
    machine = record("peers", {})["machine"] | {"device": f"{H200} (compiled for)"}
    settings = f"{BATCH} images of {SIZE} px, bfloat16, AdamW on float32 parameters."
    tables = [
        {"columns": COLUMNS[:2] + COLUMNS[3:], "rows": [x[:2] + x[3:] for x in peers]},
        {"columns": ["model", *COLUMNS[2:]], "rows": larger},
    ]
    notes = ["A training step of ViT-S/16, " + settings, "Our step with `ape`, " + settings]
    tables = [table | {"note": note} for table, note in zip(tables, notes, strict=True)]
    result = record("peers", {}, machine=machine, tables=tables, versions=_peers.versions())
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    for position in _peers.POSITIONS:
        ours = measured[_peers.OURS, position]
        for name in _peers.versions():
            for mine, theirs in zip(ours, measured.get((name, position), ours), strict=True):
                assert mine <= theirs
    for name in ("ViT-S", *LARGER):
        assert measured[name, "remat=blocks"][0] < 0.4 * measured[(name,)][0]
