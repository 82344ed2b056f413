"""The attention kernels as machine code for Hopper: no spills, tensor cores, one launch forward and one to three backward, no copies."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import memory
from rope_jax_kernels import Global, Neighborhood, Rotation, Window, attention_qkv
from rope_jax_kernels.attention.patterns import Pattern

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

SHAPES = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer of a model. backward: launches of its backward pass, with the gradients of freqs and of a bias if it has one."""

    pattern: Pattern
    places: tuple[int, ...]
    heads: int
    head_dim: int
    pairs: int
    backward: int
    bias: bool = False
    dtype: str = "bfloat16"
    batch: int = 16

    def shapes(self):
        """Of qkv, coords, freqs, bias (a single number where there is none) and the output."""
        tokens = int(np.prod(self.places))
        if isinstance(self.pattern, Window):
            window = self.pattern.fit(self.places)
            tokens, table = window.size[0] * window.size[1], window.bias_shape(self.heads)
        elif isinstance(self.pattern, Global):
            table = self.pattern.bias_shape(self.heads, tokens)
        else:
            table = self.pattern.bias_shape(self.heads)
        return (
            SHAPES((self.batch, *self.places, 3, self.heads, self.head_dim), self.dtype),
            SHAPES((tokens, 2), jnp.float32),
            SHAPES((self.heads, 2, self.pairs), jnp.float32),
            SHAPES(table if self.bias else (), jnp.float32),
            SHAPES((self.batch, *self.places, self.heads, self.head_dim), self.dtype),
        )


CASES = {
    "ViT-S": Case(Global(), (197,), 6, 64, 16, 2),
    "ViT-S, all channels, bias": Case(Global(), (196,), 6, 64, 32, 3, bias=True),
    "ViT, heads of 32": Case(Global(), (196,), 12, 32, 8, 2),
    "ViT at 512 px": Case(Global(), (1025,), 6, 64, 16, 2),
    "ViT, heads of 128": Case(Global(), (196,), 6, 128, 64, 2),
    "ViT-S, float32": Case(Global(), (197,), 6, 64, 32, 2, dtype="float32"),
    "Swin": Case(Window((7, 7), (3, 3)), (56, 56), 3, 32, 8, 2, bias=True),
    "Swin at 384 px": Case(Window((12, 12), (6, 6)), (48, 48), 3, 32, 16, 3, bias=True),
    "Swin, float16": Case(Window((7, 7), (3, 3)), (28, 28), 6, 32, 16, 1, dtype="float16"),
    "NAT": Case(Neighborhood((7, 7)), (56, 56), 2, 32, 8, 3, bias=True),
    "DiNAT": Case(Neighborhood((7, 7), (8, 8)), (56, 56), 2, 32, 16, 2),
    "NAT of 13, float32": Case(Neighborhood((13, 13)), (28, 28), 4, 32, 8, 3, bias=True, dtype="float32"),
}


def attend(case, qkv, coords, freqs, bias):
    bias = bias if case.bias else None
    return attention_qkv(qkv, pattern=case.pattern, rotation=Rotation(coords, freqs), bias=bias, implementation="triton")


def forward(case, qkv, coords, freqs, bias, cotangent):
    del cotangent
    return attend(case, qkv, coords, freqs, bias)


def train(case, qkv, coords, freqs, bias, cotangent):
    """The output and the gradients of qkv, freqs and, where there is one, bias."""
    learned = (qkv, freqs, bias) if case.bias else (qkv, freqs)
    out, pull_back = jax.vjp(lambda qkv, freqs, bias=bias: attend(case, qkv, coords, freqs, bias), *learned)
    return out, pull_back(cotangent)


@pytest.mark.parametrize("name", CASES)
def test_machine_code(name, compile_for):
    case = CASES[name]
    program = compile_for((1, 1), functools.partial(train, case), *case.shapes())
    assert program.launches() == 1 + case.backward
    for kernel in program.kernels:
        assert kernel.spilled_bytes == 0 == kernel.local_bytes
        assert 16 in kernel.load_widths
        if case.dtype != "float32":
            assert "mma" in kernel.ptx
    # Nothing else but the sums of partial gradients: no rolls, slices, concatenations or transpositions of the map.
    assert {x for x in program.operations if not x.startswith("__")} <= {"fusion", "reduce"}, program.operations


@pytest.mark.parametrize("name", ["ViT-S", "Swin", "DiNAT"])
def test_the_forward_pass_is_one_launch_and_nothing_else(name, compile_for):
    case = CASES[name]
    program = compile_for((1, 1), functools.partial(forward, case), *case.shapes())
    assert program.launches() == 1
    assert len(program.operations) == 1, program.operations


@pytest.mark.parametrize("name", ["ViT-S", "Swin", "NAT"])
def test_no_collective_when_sharded_over_batch_and_heads(name, compile_for):
    case = CASES[name]
    places = len(case.places)
    specs = [P("data", *[None] * (places + 1), "heads"), P(), P("heads"), P("heads"), P("data", *[None] * places, "heads")]
    specs[3] = specs[3] if case.bias else P()
    sharded = jax.shard_map(functools.partial(forward, case), in_specs=tuple(specs), out_specs=specs[4])
    program = compile_for((2, 3 if case.heads % 2 else 2), sharded, *case.shapes(), specs=specs)
    assert program.launches() == 1
    assert not any(word in program.text for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


@pytest.mark.parametrize("learned", [("qkv",), ("qkv", "freqs"), ("bias",)])
def test_gradients_of_some_operands_inside_shard_map(learned, compile_for):
    """Fixed frequencies, as most schemes have them, get no gradient: nothing that would have to vary over devices as they do."""
    case = CASES["Swin"]
    specs = (P("data", None, None, None, "heads"), P(), P("heads"), P("heads"), P("data", None, None, "heads"))
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
        least = q_bytes * (4 + 4 / (2 * head_dim))  # q, k, v and the output in bfloat16, log-sum-exps in float32
        assert least < memory.saved_bytes(call, None) < 1.001 * least
    kernels, plain = (sum(layers * memory.saved_bytes(call, name) for call, layers in calls.items()) for name in (None, "xla"))
    assert plain > ratio * kernels


def test_more_elements_than_32_bits_count(compile_for):
    case = dataclasses.replace(CASES["ViT-S"], batch=2**15)
    shapes = case.shapes()
    assert shapes[-1].size > 2**31
    program = compile_for((1, 1), functools.partial(forward, case), *shapes)
    stride = 2 * shapes[0].size // case.batch  # bytes from one example to the next
    assert re.search(rf"mul\.wide\.u32\s+%rd\d+, %r\d+, {stride};", program.kernels[0].ptx)
    assert not re.search(rf"mul\.lo\.s32\s+%r\d+, %r\d+, {stride // 2};", program.kernels[0].ptx)
