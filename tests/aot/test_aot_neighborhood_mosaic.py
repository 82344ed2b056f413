"""The Mosaic GPU kernels of neighbourhoods as machine code: spills, copies, launches."""

import functools
import subprocess
import sys

import jax
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks._gpus import B200, absent_gpus
from rope_jax_kernels import Neighborhood
from tests.aot.layers import attend, make_layer, train
from tests.aot.program import TARGETS, budget, collectives, compile_program

MOSAIC = TARGETS["mosaic"]
# Layer, dtype, and the registers per thread of the kernels: forward, of queries, of keys.
CASES = {
    "NAT": (make_layer("nat_mini_1"), "bfloat16", (200, 128, 128)),
    "NAT, no bias": (make_layer("nat_mini_1", bias=False), "bfloat16", (168, 128, 128)),
    "DiNAT": (make_layer("dinat_mini_1", bias=True), "float16", (200, 128, 136)),
    "heads of 64": (
        make_layer("nat_mini_1", head_dim=64, pairs=32, pattern=Neighborhood((13, 13))),
        "bfloat16",
        (255, 255, 255),
    ),
    "heads of 64, small map": (
        make_layer("nat_mini_4", head_dim=64, pairs=32, pattern=Neighborhood((3, 3))),
        "bfloat16",
        (255, 255, 255),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_machine_code(name, compile_for):
    layer, dtype, registers = CASES[name]
    shapes = layer.shapes(64, dtype)
    program = compile_for((1, 1), functools.partial(train, layer, "mosaic"), *shapes.values())
    assert program.operations.count(MOSAIC) == 3
    kernels = {x.name.removesuffix("_mosaic_gpu_kernel"): x for x in program.kernels}
    names = [f"attention_neighborhood{part}" for part in ("", "_queries", "_keys")]
    assert kernels.keys() == set(names)
    for most, kernel in zip(registers, map(kernels.get, names), strict=True):
        assert kernel.spilled_bytes <= budget(0, elsewhere=256)
        assert kernel.registers <= budget(most)
        assert kernel.ptx.count("mma.sync") > 0
        # The engine clips tiles to the array, and would not clip a run of bytes.
        assert kernel.tensors_out == 2
        assert kernel.runs_out == 0


def check_blackwell(folder):
    """The default on a B200, with gradients, has these kernels, and no register spills."""
    layer, dtype, _ = CASES["NAT"]
    shapes = layer.shapes(64, dtype).values()
    step = functools.partial(train, layer, None)
    program = compile_program(absent_gpus(kind=B200), (1, 1), folder, step, list(shapes))
    assert program.operations.count(MOSAIC) == len(program.kernels) == 3
    assert max(x.spilled_bytes for x in program.kernels) <= budget(0, elsewhere=256)


def test_blackwell(tmp_path):
    """In a process of its own: Mosaic GPU compiles for one generation of GPUs in each."""
    command = [sys.executable, "-m", "tests.aot.test_aot_neighborhood_mosaic", tmp_path]
    subprocess.run(command, check=True, timeout=500)


@pytest.mark.parametrize("check_vma", [True, False])
def test_no_collective_when_sharded_over_batch_and_heads(check_vma, compile_for):
    """Forward and backward in one program."""
    layer = make_layer("nat_mini_3", bias=True)
    forward = functools.partial(attend, layer, "mosaic")
    specs = [P("data", None, None, None, "heads"), P(), P("heads"), P("heads")]
    out = P("data", None, None, "heads")
    options = {"in_specs": tuple(specs), "out_specs": out, "check_vma": check_vma}
    sharded = jax.shard_map(forward, **options)

    def step(qkv, coords, freqs, bias, cotangent):
        out, pull_back = jax.vjp(lambda qkv: sharded(qkv, coords, freqs, bias), qkv)
        return out, pull_back(cotangent)

    *operands, cotangent = layer.shapes(16).values()
    program = compile_for((2, 2), step, *operands, cotangent, specs=[*specs, out])
    assert program.operations.count(MOSAIC) == 3
    assert collectives(program.text) == []


if __name__ == "__main__":
    check_blackwell(sys.argv[1])
