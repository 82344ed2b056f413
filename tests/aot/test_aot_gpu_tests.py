"""What the GPU tests and benchmarks run, compiled for Hopper.

Errors that a compiler can find are found here, without a GPU.
"""

import functools
import pathlib
import re

import jax
import pytest

from benchmarks import _layers, _timing
from benchmarks._program import compile_ahead
from rope_jax_kernels import Choices
from tests.gpu import programs

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)
RUNS = [*programs.RUNS, *programs.MANY_EXAMPLES, *programs.MANY_ELEMENTS]


@pytest.fixture
def launches(gpus, tmp_path):
    """launches(f, shapes, donate=()) -> what a program launches, as text; see `_timing`."""

    def compile_one(f, shapes, donate=()):
        dump = {"xla_dump_to": str(tmp_path), "xla_dump_emitter_re": "ptx"}
        compile_ahead(f, shapes, gpus[0], donate=donate, options=dump)
        return _timing.launches_in(pathlib.Path(tmp_path))

    return compile_one


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run} {run.batch}")
def test_programs_of_the_gpu_tests(run, launches):
    """A grid's second and third axes have at most 65,535 programs."""
    grids = re.findall(r"grid: \[(\d+), (\d+), (\d+)\]", launches(run, run.shapes()))
    assert all(max(int(y), int(z)) < 2**16 for _, y, z in grids)


def test_the_kernel_that_only_stores(launches, tmp_path):
    """It neither reads nor computes anything; each step is a launch in a CUDA graph."""
    loop = _timing.loop_of(_timing.stored, 5, 8)
    text = launches(loop, jax.eval_shape(lambda: _timing._ones(1)), donate=(0,))
    assert len(re.findall(r"kCustomKernel .*\bstored grid: \[1, 1, 1\] threads: \[32,", text)) == 8
    assert _timing.graph_share(text) == 1.0
    ptx = next(x for path in tmp_path.glob("*.ptx") if "stored" in (x := path.read_text()))
    assert len(re.findall(r"st\.global", ptx)) == 1
    assert not re.search(r"ld\.global|sin|cos|mul\.f|fma", ptx)


# Launches of one layer of the benchmark beside its tables of angles, and their share in graphs:
# XLA puts neither cuDNN's calls nor those of Mosaic into a graph.
FORMS = {
    ("ViT", "forward", "triton+rope"): ("attention_forward_kernel", 1.0),
    ("ViT", "forward", "cudnn"): ("kCuDnn", 0.0),
    ("ViT", "forward", "mosaic"): ("kCustomCall", 0.0),
    ("Swin", "training", "triton+rope"): ("attention_closed_kernel", 1.0),
}


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_a_loop_of_the_benchmark_launches_every_layer(case, launches):
    *about, form = case
    layer = next(x for x in _layers.layers(short=False) if [x.model, x.direction] == about)
    kernel, share = FORMS[case]
    shapes = jax.eval_shape(functools.partial(layer.operands, _layers.copies_of(layer, True)))
    with Choices():
        text = launches(_layers.loop_of(layer, form, _layers.ROUNDS, _layers.STEPS), shapes)
    body = text[text.index("body:") :]
    assert len(re.findall(rf"\b{kernel}\b(?=$| grid)", body, re.M)) == _layers.STEPS
    assert _timing.graph_share(text) == share
    assert "kCopy" not in body
