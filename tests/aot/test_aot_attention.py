"""The attention kernels as machine code for Hopper: spills, tensor cores, launches, copies."""

import dataclasses
import functools
import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import machine_code, memory
from benchmarks._listing import tool_path
from rope_jax_kernels import Neighborhood, Rotation, Window, attention_qkv
from rope_jax_kernels.model_shapes import LAYERS, Layer
from tests.aot.program import budget

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, and the launches of its backward pass with gradients of freqs and of any bias."""

    layer: Layer
    backward: int
    dtype: str = "bfloat16"
    batch: int = 16

    def shapes(self):
        """Of qkv, coords, freqs, bias (a single number where there is none) and the output."""
        return self.layer.shapes(self.batch, self.dtype).values()


def case_of(name, backward, *, dtype="bfloat16", **changes):
    return Case(dataclasses.replace(LAYERS[name], **changes), backward, dtype)


CASES = {
    "ViT-S": case_of("vit_s_class_token", 2),
    "ViT-S, all channels": case_of("vit_s_rope_mixed", 2),
    "ViT-S, all channels, bias": case_of("vit_s_rope_mixed", 3, bias=True),
    "ViT, heads of 32": case_of("vit_s_12_heads", 2),
    "ViT at 512 px": case_of("vit_s_512px", 2),
    "ViT, heads of 128": case_of("vit_heads_of_128", 2),
    "ViT-S, float32": case_of("vit_s_class_token", 2, pairs=32, dtype="float32"),
    "Swin at 384 px, no bias": case_of("swin_384px", 2, bias=False),
    "Swin": case_of("swin_t_1", 1),
    "Swin, heads of 64": case_of("swin_t_1", 2, head_dim=64, pairs=16),
    "Swin at 384 px": case_of("swin_384px", 3),
    "Swin, float16": case_of("swin_t_2", 1, pairs=16, bias=False, dtype="float16"),
    "NAT": case_of("nat_mini_1", 3),
    "NAT, all channels, no bias": case_of("nat_mini_1", 2, pairs=16, bias=False),
    "DiNAT": case_of("dinat_mini_1", 2),
    "NAT of 13, float32": case_of("nat_mini_2", 3, pattern=Neighborhood((13, 13)), dtype="float32"),
}


def attend(case, qkv, coords, freqs, bias):
    return attention_qkv(
        qkv,
        pattern=case.layer.pattern,
        rotation=Rotation(coords, freqs),
        bias=bias if case.layer.bias else None,
        implementation="triton",
    )


def forward(case, qkv, coords, freqs, bias, cotangent):
    del cotangent
    return attend(case, qkv, coords, freqs, bias)


def train(case, qkv, coords, freqs, bias, cotangent):
    """The output and the gradients of qkv, freqs and, where there is one, bias."""
    learned = (qkv, freqs, bias) if case.layer.bias else (qkv, freqs)
    out, pull_back = jax.vjp(
        lambda qkv, freqs, bias=bias: attend(case, qkv, coords, freqs, bias), *learned
    )
    return out, pull_back(cotangent)


@pytest.mark.parametrize("name", CASES)
def test_machine_code(name, compile_for):
    case = CASES[name]
    program = compile_for((1, 1), functools.partial(train, case), *case.shapes())
    assert program.launches() == 1 + case.backward
    for kernel in program.kernels:
        assert kernel.local_bytes <= budget(0)
        assert 16 in kernel.load_widths
        if case.dtype != "float32":
            assert "mma" in kernel.ptx
    # Only sums of partial gradients: no rolls, slices, concatenations or transpositions of the map.
    assert {x for x in program.operations if not x.startswith("__")} <= {"fusion", "reduce"}, (
        program.operations
    )


NEEDS_NVDISASM = pytest.mark.skipif(
    tool_path("nvdisasm") is None,
    reason="there is no nvdisasm, neither in the nvidia wheels nor on PATH; run `make test-aot`",
)
# Instructions a logit, forward and backward, that no change may exceed; 3 % above what they are.
BUDGETS = {
    "ViT, 6 heads of 64": (23.9, 80.7),
    "ViT, 6 heads of 64, mosaic": (27.8, 47.4),
    "ViT, 12 heads of 32": (21.4, 71.7),
    "ViT, 12 heads of 32, mosaic": (23.3, 32.9),
    "Swin, stage 1": (40.7, 93.1),
    "Swin, stage 1, bias": (44.5, 96.4),
    "NAT, stage 1": (105.1, 259.4),
    "NAT, stage 1, bias": (120.4, 513.5),
}


@NEEDS_NVDISASM
@pytest.mark.parametrize("name", machine_code.CASES)
def test_instructions_stay_within_their_budget(name):
    case = machine_code.CASES[name]
    codes = machine_code.kernels_of(case)
    mosaic = case.implementation == "mosaic"
    kernels = 2 if mosaic or isinstance(case.layer.pattern, Window) else 3 + case.layer.bias
    assert len(codes) == kernels
    for code in codes:
        if code.kernel == "attention_bias_kernel":  # loops over the examples of a group
            assert [rounds for _, rounds in code.loops] == [43]
        # Mosaic GPU's forward kernel computes each angle of 64 tokens once, by 128 threads.
        once = case.layer.pairs * 64 // 128 if code.kernel == "attention_mosaic" else 0
        assert code.sines == once, code
        assert code.spilled <= budget(0, elsewhere=256), code
        # One block computes while another one waits; of Mosaic GPU's, warpgroups of one block.
        assert code.resident(machine_code.gpu_of(machine_code.H200)) >= (1 if mosaic else 2), code
    rows = machine_code.rows_of(name, codes, case)
    for row, most in zip(rows, BUDGETS[name], strict=True):
        assert row["instructions_per_logit"] <= budget(most), row


@NEEDS_NVDISASM
@pytest.mark.parametrize("kind", [machine_code.A100, machine_code.L4])
@pytest.mark.parametrize("name", ["ViT, 6 heads of 64", "NAT, stage 1, bias", "Swin, stage 1"])
def test_registers_suffice_on_older_gpus(name, kind):
    for code in machine_code.kernels_of(machine_code.CASES[name], kind):
        # The kernel that has all gradients of a window spills.
        spilled = 128 if code.kernel == "attention_closed_kernel" else 0
        assert code.spilled <= budget(spilled, elsewhere=256), code


# Instructions of a thread, sines and cosines included; 3 % above what they are.
ROTATION_BUDGETS = [132, 132, 438, 767]


@NEEDS_NVDISASM
@pytest.mark.parametrize(
    ("name", "most"), list(zip(machine_code.ROTATIONS, ROTATION_BUDGETS, strict=True))
)
def test_instructions_of_rotations_stay_within_their_budget(name, most):
    code = machine_code.rotation_kernel(machine_code.ROTATIONS[name])
    assert code.instructions <= budget(most), code
    assert code.spilled <= budget(0, elsewhere=256), code
    assert code.sines in (2, 8), code  # of each pair both at once: 2 or 8 pairs a thread


@pytest.mark.parametrize("name", ["ViT-S", "Swin", "DiNAT"])
def test_the_forward_pass_is_one_launch_after_its_tables(name, compile_for):
    case = CASES[name]
    program = compile_for((1, 1), functools.partial(forward, case), *case.shapes())
    assert program.launches() == 1
    # One operation computes all cosines and sines; its results have no batch dimension. Another one
    # looks up a bias.
    tables = 2 if case.layer.bias else 1
    assert len(program.operations) == tables + 1, program.operations
    assert program.operations[:-1] == ["fusion"] * tables
    _, _, freqs, _, _ = case.shapes()
    heads, _, pairs = freqs.shape
    table = rf"f32\[{heads},{case.layer.pattern.rotated_tokens(case.layer.places)},{pairs}\]"
    assert re.search(rf"= \({table}\S*, {table}\S*\) fusion\(", program.text)


@pytest.mark.parametrize("name", ["ViT-S", "Swin", "NAT"])
def test_no_collective_when_sharded_over_batch_and_heads(name, compile_for):
    case = CASES[name]
    places = len(case.layer.places)
    specs = [
        P("data", *[None] * (places + 1), "heads"),
        P(),
        P("heads"),
        P("heads"),
        P("data", *[None] * places, "heads"),
    ]
    specs[3] = specs[3] if case.layer.bias else P()
    sharded = jax.shard_map(
        functools.partial(forward, case), in_specs=tuple(specs), out_specs=specs[4]
    )
    program = compile_for(
        (2, 3 if case.layer.heads % 2 else 2), sharded, *case.shapes(), specs=specs
    )
    assert program.launches() == 1
    assert not any(
        word in program.text
        for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    )


@pytest.mark.parametrize("learned", [("qkv",), ("qkv", "freqs"), ("bias",)])
def test_gradients_of_some_operands_inside_shard_map(learned, compile_for):
    """Fixed frequencies, as most schemes have them, get no gradient."""
    case = CASES["Swin"]
    specs = (
        P("data", None, None, None, "heads"),
        P(),
        P("heads"),
        P("heads"),
        P("data", None, None, "heads"),
    )
    sharded = jax.shard_map(functools.partial(attend, case), in_specs=specs[:4], out_specs=specs[4])

    def step(qkv, coords, freqs, bias, cotangent):
        operands = {"qkv": qkv, "coords": coords, "freqs": freqs, "bias": bias}
        run = lambda some: sharded(*(operands | some).values())
        return jax.vjp(run, {name: operands[name] for name in learned})[1](cotangent)

    program = compile_for((2, 3), step, *case.shapes(), specs=specs)
    assert program.launches() == 2


@pytest.mark.parametrize(("model", "ratio"), [("vit_s16", 5.2), ("swin_t", 2.3), ("nat_mini", 8.4)])
def test_nothing_is_saved_but_operands_output_and_a_number_for_each_query(model, ratio):
    """Of all layers of a model, against plain jax.numpy."""
    calls = memory.attention_calls(model, 128)
    for call in calls:
        _, qkv, *_ = call
        q_bytes, head_dim = 2 * qkv.size / 3, qkv.shape[-1]
        least = q_bytes * (
            4 + 4 / (2 * head_dim)
        )  # q, k, v and the output in bfloat16, log-sum-exps in float32
        assert least < memory.saved_bytes(call, None) < 1.001 * least
    kernels, plain = (
        sum(layers * memory.saved_bytes(call, name) for call, layers in calls.items())
        for name in (None, "xla")
    )
    assert plain > ratio * kernels


def test_more_elements_than_32_bits_count(compile_for):
    case = dataclasses.replace(CASES["ViT-S"], batch=2**15)
    shapes = list(case.shapes())
    assert shapes[-1].size > 2**31
    program = compile_for((1, 1), functools.partial(forward, case), *shapes)
    stride = 2 * shapes[0].size // case.batch  # bytes from one example to the next
    assert re.search(rf"mul\.wide\.u32\s+%rd\d+, %r\d+, {stride};", program.kernels[0].ptx)
    assert not re.search(rf"mul\.lo\.s32\s+%r\d+, %r\d+, {stride // 2};", program.kernels[0].ptx)
