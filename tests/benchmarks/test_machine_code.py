"""What is read from listings of machine code, and the bounds that follow."""

import pytest

from benchmarks import machine_code
from rope_jax_kernels.model_shapes import LAYERS

H200 = machine_code.gpu_of(machine_code.H200)

LISTING = """
        .section .text.attention_forward_kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   FMUL R2, R3, 0.63661974668502807617 ;
.L_x_0:
        /*0020*/                   FADD R2, R2, 1 ;
        /*0030*/              @!P0 BRA `(.L_x_0) ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
.L_x_2:
        /*0060*/                   BRA `(.L_x_2);
        /*0070*/                   NOP;
"""


def code(**changes):
    fields = {"kernel": "attention_forward_kernel", "registers": 128, "spilled": 0}
    fields |= {"shared": 30_000, "instructions": 100, "loop": 40, "rounds": 4}
    return machine_code.Code(**fields | {"blocks": 1056, "warps": 4, "sines": 0} | changes)


def test_instructions_and_the_longest_loop():
    instructions, loop = machine_code.instructions_of(LISTING)
    assert [x.split()[-1] for x in instructions[-2:]] == ["`(.L_x_1)", "EXIT"]
    assert len(instructions) == 6  # not what fills the code up behind its end
    assert loop == 4
    called, none = machine_code.instructions_of(LISTING.replace("BRA", "CALL"))
    assert (called[:6], none) == ([x.replace("BRA", "CALL") for x in instructions], 0)
    assert [x.split()[0] for x in called[6:]] == ["CALL", "NOP"]


def test_the_time_to_issue_all_instructions():
    assert code().issued == 100 + 3 * 40
    # Eight blocks of four warps on each of 132 multiprocessors: eight warps for each scheduler.
    assert code().issue_us(H200) == pytest.approx(8 * 220 / 1980)
    assert code(loop=0, rounds=1).issued == 100


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [({}, 4), ({"registers": 255}, 2), ({"shared": 100_000}, 2), ({"warps": 16}, 1)],
)
def test_the_scarcest_resource_limits_resident_blocks(changes, blocks):
    assert code(**changes).resident(H200) == blocks


@pytest.mark.parametrize(
    ("name", "pairs"),
    [("vit_s", 196**2), ("swin_t_1", 56**2 * 49), ("nat_mini_1", 56**2 * 49)],
)
def test_pairs_that_a_pattern_allows(name, pairs):
    assert machine_code.pairs_of(LAYERS[name]) == pairs


def test_each_pass_has_a_row_in_the_table():
    layer, batch = machine_code.layer_and_batch("ViT, 6 heads of 64")
    names = [f"attention_{x}_kernel" for x in ("forward", "query", "key")]
    rows = machine_code.rows_of("ViT", [code(kernel=x) for x in names], layer, batch)
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    assert rows[1]["issue_us"] == pytest.approx(2 * rows[0]["issue_us"])
    assert rows[1]["copy_us"] == 2 * rows[0]["copy_us"]
    logits = 256 * 6 * 197**2
    assert rows[0]["instructions_per_logit"] == 32 * 4 * 1056 * 220 / logits
    lines = machine_code.table({"rows": rows}).splitlines()
    assert lines[2].startswith("| H200 | ViT, batch 256 | forward | 0.89 | 36 |")
    assert lines[-1].startswith("|  |  |  |  |  |  | key | 100 (40 x 4) | 128 | 0 | 16 |")
