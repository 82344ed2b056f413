"""What the GPU tests and benchmarks run, compiled for Hopper.

Errors that a compiler can find are found here, without a GPU.
"""

import re

import jax
import pytest

from benchmarks import _layers, _timing
from rope_jax_kernels import Choices
from rope_jax_kernels.model_shapes import LAYERS
from tests.aot.program import compile_ahead, launches
from tests.gpu import programs

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)
RUNS = [*programs.RUNS, *programs.MANY_EXAMPLES, *programs.MANY_ELEMENTS]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run} {run.batch}")
def test_programs_of_the_gpu_tests(run, gpus, tmp_path):
    """A grid's second and third axes have at most 65,535 programs."""
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_emitter_re": "none"}
    compile_ahead(run, run.shapes(), gpus[0], options=dump)
    listed = "".join(path.read_text() for path in tmp_path.glob("*thunk_sequence.txt"))
    grids = re.findall(r"grid: \[(\d+), (\d+), (\d+)\]", listed)
    assert all(max(int(y), int(z)) < 2**16 for _, y, z in grids)


# What launches a layer of the benchmark.
FORMS = {
    ("vit_s", "forward", "triton+rope"): "triton",
    ("vit_s", "forward", "cudnn"): "cudnn",
    ("vit_s", "forward", "mosaic"): "mosaic",
    ("swin_t_1", "training", "triton+rope"): "triton",
}


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_a_loop_of_the_benchmark_launches_every_layer(case, gpus):
    name, direction, form = case
    layer, copies = LAYERS[name], 5
    loop = _timing.loop_of(_layers.step_of(layer.pattern, form, direction), 4, in_place=False)
    shapes = jax.eval_shape(lambda: _layers.operands(layer, 128, copies))
    with Choices():
        text = compile_ahead(loop, shapes, gpus[0]).as_text()
    (body,) = re.findall(r"body=%([\w.-]+)", text)
    kinds = [x.kind for x in launches(text, body)]
    found = sum(FORMS[case] in x for x in kinds)
    assert found == _timing.steps_of(copies) * (1 + (direction == "training"))
    assert "copy" not in kinds
