"""The attention kernels as machine code for Hopper: spills, tensor cores, launches, copies."""

import functools
import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

from rope_jax_kernels import Neighborhood
from tests.aot.layers import attend, make_layer, train
from tests.aot.program import budget, collectives


def make_case(name, backward, dtype="bfloat16", **changes):
    """A layer, its dtype, and the launches of its backward pass with all gradients."""
    return make_layer(name, **changes), dtype, backward


CASES = {
    "ViT-S": make_case("vit_s_class_token", 2),
    "ViT-S, all channels": make_case("vit_s_rope_mixed", 2),
    "ViT-S, all channels, bias": make_case("vit_s_rope_mixed", 3, bias=True),
    "ViT, heads of 32": make_case("vit_s_12_heads", 2),
    "ViT at 512 px": make_case("vit_s_512px", 2),
    "ViT, heads of 128": make_case("vit_heads_of_128", 2),
    "ViT-S, float32": make_case("vit_s_class_token", 2, pairs=32, dtype="float32"),
    "Swin at 384 px, no bias": make_case("swin_384px", 2, bias=False),
    "Swin": make_case("swin_t_1", 1),
    "Swin, heads of 64": make_case("swin_t_1", 2, head_dim=64, pairs=16),
    "Swin at 384 px": make_case("swin_384px", 3),
    "Swin, float16": make_case("swin_t_2", 1, pairs=16, bias=False, dtype="float16"),
    "NAT": make_case("nat_mini_1", 3),
    "NAT, all channels, no bias": make_case("nat_mini_1", 2, pairs=16, bias=False),
    "DiNAT": make_case("dinat_mini_1", 2),
    "NAT of 13, float32": make_case(
        "nat_mini_2", 3, pattern=Neighborhood((13, 13)), dtype="float32"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_machine_code(name, compile_for):
    layer, dtype, backward = CASES[name]
    f = functools.partial(train, layer, "triton")
    program = compile_for((1, 1), f, *layer.shapes(16, dtype).values())
    assert program.launches() == 1 + backward
    for kernel in program.kernels:
        assert kernel.local_bytes <= budget(0)
        assert 16 in kernel.load_widths
        if dtype != "float32":
            assert "mma" in kernel.ptx
    # Only sums of partial gradients: no rolls, slices, concatenations or transpositions of the map.
    assert {x for x in program.operations if not x.startswith("__")} <= {"fusion", "reduce"}, (
        program.operations
    )


@pytest.mark.parametrize(
    ("implementation", "layer", "check_vma", "learned", "count"),
    [
        ("triton", make_layer("vit_s_class_token"), True, ["qkv"], 3),
        ("triton", make_layer("nat_mini_1"), True, ["qkv"], 3),
        ("triton", make_layer("swin_t_1"), True, ["qkv"], 2),
        ("triton", make_layer("swin_t_1"), True, ["qkv", "freqs"], 2),
        ("triton", make_layer("swin_t_1"), True, ["bias"], 2),
        (None, make_layer("vit_s_class_token"), True, ["qkv"], 1),  # unpacks before cuDNN
        (None, make_layer("vit_s_class_token", bias=True), True, ["qkv", "bias"], 1),
        ("mosaic", make_layer("vit_s_class_token"), True, ["qkv"], 2),
        ("mosaic", make_layer("vit_s_class_token"), False, ["qkv"], 2),
        ("mosaic", make_layer("swin_t_1", bias=False), True, ["qkv"], 2),
        ("mosaic", make_layer("swin_t_1", bias=False), False, ["qkv"], 2),
        ("mosaic", make_layer("nat_mini_3"), True, ["qkv"], 3),
        ("mosaic", make_layer("nat_mini_3"), False, ["qkv"], 3),
    ],
)
def test_sharded_over_batch_and_heads(
    implementation, layer, check_vma, learned, count, compile_for
):
    """Forward and with gradients: only sums over examples are communicated.

    Fixed frequencies, as in most schemes, have no gradient.
    """
    shapes, bias_spec = layer.shapes(16), P("heads") if layer.bias else P()
    data = P("data", *[None] * (1 + len(layer.places)), "heads")
    output = P("data", *[None] * len(layer.places), "heads")
    specs = [data, P(), P("heads"), bias_spec, output]
    options = {"in_specs": tuple(specs[:4]), "out_specs": specs[4], "check_vma": check_vma}
    sharded = jax.shard_map(functools.partial(attend, layer, implementation), **options)

    def step(*arguments):
        *operands, cotangent = arguments
        operands = dict(zip(shapes, operands, strict=False))
        run = lambda learned_operands: sharded(*(operands | learned_operands).values())
        out, pull_back = jax.vjp(run, {name: operands[name] for name in learned})
        return out, pull_back(cotangent)

    mesh = 2, 3 if layer.heads % 2 else 2
    program = compile_for(mesh, step, *shapes.values(), specs=specs)
    assert program.launches() == count
    assert (collectives(program.text) == []) == (learned == ["qkv"])


@pytest.mark.parametrize(
    ("name", "ratio"), [("vit_s_12_heads", 5.2), ("swin_t_1", 2.7), ("nat_mini_1", 9.0)]
)
def test_training_saves_operands_outputs_and_one_number_per_query(name, ratio, gpus):
    """Bytes that a layer saves in training, against plain jax.numpy."""
    layer = make_layer(name, bias=False)
    *operands, _, out = layer.shapes(128).values()

    def count_bytes(implementation):
        def save(qkv, coords, freqs):
            f = lambda qkv: attend(layer, implementation, qkv, coords, freqs)
            return jax.tree.leaves(jax.vjp(f, qkv)[1])

        with jax.sharding.use_abstract_mesh(jax.sharding.Mesh(gpus[:1], ("data",)).abstract_mesh):
            variables = jax.make_jaxpr(save)(*operands).jaxpr.outvars
        # An array that is saved twice is one variable.
        return sum({id(x): x.aval.size * x.aval.dtype.itemsize for x in variables}.values())

    # q, k, v and the output in bfloat16, logarithms of sums in float32.
    minimum = 2 * out.size * 4 + 4 * out.size / layer.head_dim
    assert minimum < count_bytes("triton") < 1.001 * minimum
    assert count_bytes("xla") > ratio * count_bytes("triton")


def test_more_elements_than_32_bits_can_index(compile_for):
    layer, dtype, _ = CASES["ViT-S"]
    *shapes, out = layer.shapes(2**15, dtype).values()
    assert out.size > 2**31
    program = compile_for((1, 1), functools.partial(attend, layer, "triton"), *shapes)
    stride = 2 * shapes[0].size // 2**15  # bytes from one example to the next
    assert re.search(rf"mul\.wide\.u32\s+%rd\d+, %r\d+, {stride};", program.kernels[0].ptx)
    assert not re.search(rf"mul\.lo\.s32\s+%r\d+, %r\d+, {stride // 2};", program.kernels[0].ptx)
