"""What the GPU tests and benchmarks run, compiled for Hopper.

Errors that a compiler can find are found here, without a GPU.
"""

import functools
import math
import re

import jax
import pytest

from benchmarks import _layers, _timing, rotary
from rope_jax_kernels import Choices
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


@pytest.mark.parametrize(
    ("form", "kind"), [("triton+rope", "triton"), ("cudnn", "cudnn"), ("mosaic", "mosaic")]
)
def test_a_loop_of_the_benchmark_launches_every_layer(form, kind, gpus):
    layer = next(x for x in _layers.layers(short=False) if x.model == "ViT")
    shapes = jax.eval_shape(functools.partial(layer.operands, _layers.copies_of(layer, True)))
    loop = _layers.loop_of(layer, form, _layers.ROUNDS, _layers.STEPS)
    with Choices():
        text = compile_ahead(loop, shapes, gpus[0]).as_text()
    (body,) = re.findall(r"body=%([\w.-]+)", text)
    kinds = [x.kind for x in launches(text, body)]
    assert sum(kind in x for x in kinds) == _layers.STEPS
    assert "copy" not in kinds


@pytest.mark.parametrize("form", ["xla", "triton"])
@pytest.mark.parametrize("temperature", rotary.REPEATS)
def test_a_loop_of_rotations_launches_once_a_step(temperature, form, gpus):
    """And copies nothing: neither back to where a loop began, nor around a kernel."""
    case = rotary.Case(16, 3, 14, 64, "16-32", "backward")
    copies, repeats = 1 if temperature == "hot" else 4, rotary.REPEATS[temperature]
    loop = _timing.loop_of(rotary.step_of(case, form), 5, repeats)
    shapes = jax.eval_shape(lambda: rotary.operands(case, form, copies))
    text = compile_ahead(loop, shapes, gpus[0], donate=(0,)).as_text()
    (body,) = re.findall(r"body=%([\w.-]+)", text)
    kinds = [x.kind for x in launches(text, body) if x.bytes >= 4 * math.prod(case.shape)]
    kind = "fusion" if form == "xla" else "__gpu$xla.gpu.triton"
    assert kinds == [kind] * repeats * copies
