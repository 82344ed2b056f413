"""What the GPU tests and benchmarks run, compiled for Hopper.

Errors that a compiler can find are found here, without a GPU.
"""

import re

import jax
import pytest

from benchmarks import _layers, _timing
from benchmarks._program import compile_ahead
from rope_jax_kernels import Choices
from rope_jax_kernels.model_shapes import LAYERS
from tests.gpu import programs

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)
RUNS = [*programs.RUNS, *programs.MANY_EXAMPLES, *programs.MANY_ELEMENTS]


@pytest.fixture
def launches(gpus, tmp_path):
    """launches(f, shapes) -> what a program launches, as text, in CUDA graphs where XLA has any."""

    def compile_one(f, shapes):
        dump = {"xla_dump_to": str(tmp_path), "xla_dump_emitter_re": "none"}
        compile_ahead(f, shapes, gpus[0], options=dump)
        names = ("thunk_sequence.txt", "thunk_sequence_after_thunk_passes.txt")
        return [x for name in names for x in tmp_path.glob(f"*.{name}")][-1].read_text()

    return compile_one


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run} {run.batch}")
def test_programs_of_the_gpu_tests(run, launches):
    """A grid's second and third axes have at most 65,535 programs."""
    grids = re.findall(r"grid: \[(\d+), (\d+), (\d+)\]", launches(run, run.shapes()))
    assert all(max(int(y), int(z)) < 2**16 for _, y, z in grids)


# What a layer of the benchmark launches, and whether XLA puts it into a CUDA graph: it leaves out
# the calls of cuDNN and those of Mosaic.
FORMS = {
    ("vit_s", "forward", "triton+rope"): ("attention_forward_kernel", True),
    ("vit_s", "forward", "cudnn"): ("kCuDnn", False),
    ("vit_s", "forward", "mosaic"): ("kCustomCall", False),
    ("swin_t_1", "training", "triton+rope"): ("attention_closed_kernel", True),
}


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_a_loop_of_the_benchmark_launches_every_layer(case, launches):
    name, direction, form = case
    kernel, in_graphs = FORMS[case]
    layer, copies = LAYERS[name], 5
    loop = _timing.loop_of(_layers.step_of(layer.pattern, form, direction), 4, in_place=False)
    with Choices():
        text = launches(loop, jax.eval_shape(lambda: _layers.operands(layer, 128, copies)))
    body = text[text.index("body:") :]
    assert len(re.findall(rf"\b{kernel}\b(?=$| grid)", body, re.M)) == _timing.steps_of(copies)
    assert ("kCommandBuffer" in body) == in_graphs
    assert "kCopy" not in body
