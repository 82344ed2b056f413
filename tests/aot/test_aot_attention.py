"""The attention kernels as machine code for Hopper: no spills, tensor cores, one launch forward and one to three backward, no copies."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

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
        """Of qkv, coords, freqs, bias (or None) and the output."""
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
            SHAPES(table, jnp.float32) if self.bias else None,
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
    return attention_qkv(qkv, pattern=case.pattern, rotation=Rotation(coords, freqs), bias=bias, implementation="triton")


def forward(case, qkv, coords, freqs, bias, cotangent):
    del cotangent
    return attend(case, qkv, coords, freqs, bias)


def train(case, qkv, coords, freqs, bias, cotangent):
    """The output and the gradients of qkv, freqs and bias."""
    out, pull_back = jax.vjp(lambda qkv, freqs, bias: attend(case, qkv, coords, freqs, bias), qkv, freqs, bias)
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
    assert not any(name in program.text for name in ("rotate.", "roll", " transpose("))


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
    shapes = list(case.shapes())
    if shapes[3] is None:
        shapes[3] = SHAPES((), jnp.float32)
        specs[3] = P()
    heads = 3 if case.heads % 2 else 2

    def step(qkv, coords, freqs, bias, cotangent):
        return forward(case, qkv, coords, freqs, bias if case.bias else None, cotangent)

    sharded = jax.shard_map(step, in_specs=tuple(specs), out_specs=specs[4])
    program = compile_for((2, heads), sharded, *shapes, specs=specs)
    assert program.launches() == 1
    assert not any(word in program.text for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
