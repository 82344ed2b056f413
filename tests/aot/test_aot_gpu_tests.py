"""The programs of the GPU tests and benchmarks, compiled for Hopper.

Errors that a compiler can find are found here, without a GPU.
"""

import functools
import math
import re

import jax
import pytest

from benchmarks import _layers, _rotations
from benchmarks._model_shapes import LAYERS
from rope_jax.analysis import timing
from rope_jax_kernels import Choices
from tests.aot.program import compile_ahead, launches
from tests.gpu import programs

RUNS = [*programs.RUNS, *programs.MANY_EXAMPLES, *programs.MANY_ELEMENTS]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run} {run.batch}")
def test_programs_of_the_gpu_tests_compile(run, gpus, tmp_path):
    """A grid's second and third axes have at most 65,535 programs."""
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_emitter_re": "none"}
    compile_ahead(run, run.shapes(), gpus[0], options=dump)
    listed = "".join(path.read_text() for path in tmp_path.glob("*thunk_sequence.txt"))
    grids = re.findall(r"grid: \[(\d+), (\d+), (\d+)\]", listed)
    assert all(max(int(y), int(z)) < 2**16 for _, y, z in grids)


def kinds_in_loop(step, operands, gpu, *, in_place, min_bytes=0):
    """Kinds of the launches in a benchmark's loop that move at least `min_bytes`."""
    rounds = 4
    loop = timing.make_loop(step, rounds, in_place=in_place)
    shapes = jax.eval_shape(operands)
    with Choices():
        donate = (0,) if in_place else ()
        text = compile_ahead(loop, shapes, gpu, donate=donate).as_text()
    return [x.kind for x in launches(text) if x.times == rounds and x.bytes >= min_bytes]


@pytest.mark.parametrize(
    ("name", "direction", "form", "kind"),
    [
        ("vit_s", "forward", "triton+rope", "triton"),
        ("vit_s", "forward", "cudnn", "cudnn"),
        ("vit_s", "forward", "mosaic", "mosaic"),
        ("swin_t_1", "training", "triton+rope", "triton"),
    ],
)
def test_benchmark_loops_launch_every_layer(name, direction, form, kind, gpus):
    layer, copies = LAYERS[name], 5
    step = _layers.make_step(layer.pattern, form, direction)
    operands = functools.partial(_layers.operands, layer, 128, copies)
    kinds = kinds_in_loop(step, operands, gpus[0], in_place=False)
    each = 1 + (direction == "training")
    assert sum(kind in x for x in kinds) == timing.count_steps(copies) * each
    assert "copy" not in kinds


@pytest.mark.parametrize("form", ["xla", "triton"])
@pytest.mark.parametrize("copies", [1, 4])
def test_rotation_loops_launch_once_per_step(copies, form, gpus):
    """They copy nothing, neither to the start of the loop nor around a kernel."""
    problem = _rotations.Problem((16, 3, 14, 64), direction="backward")
    operands = functools.partial(_rotations.operands, problem, form, copies)
    step, min_bytes = _rotations.make_step(problem, form), 4 * math.prod(problem.shape)
    kinds = kinds_in_loop(step, operands, gpus[0], in_place=True, min_bytes=min_bytes)
    kind = "fusion" if form == "xla" else "__gpu$xla.gpu.triton"
    assert kinds == [kind] * timing.count_steps(copies)
