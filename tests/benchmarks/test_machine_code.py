"""What is read from listings of machine code, and the bounds that follow."""

import pytest

from benchmarks import machine_code
from benchmarks._listing import Shared, read_listing
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


# As in kernels of Mosaic GPU: a loop in a loop, a branch, and a wait behind the end.
NESTED = """
        /*0000*/                   MOV R1, R2 ;
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRYWAIT P0, [R2], R4 ;
        /*0020*/              @!P0 BRA `(.L_x_5) ;
.L_x_1:
        /*0030*/                   MOV R1, R2 ;
.L_x_2:
        /*0040*/                   MOV R1, R2 ;
        /*0050*/                   MOV R1, R2 ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
        /*0070*/               @P2 BRA `(.L_x_3) ;
        /*0080*/                   MOV R1, R2 ;
        /*0090*/                   MOV R1, R2 ;
.L_x_3:
        /*00a0*/               @P3 BRA `(.L_x_1) ;
        /*00b0*/               @P4 BRA `(.L_x_0) ;
        /*00c0*/                   EXIT ;
.L_x_5:
        /*00d0*/                   SYNCS.PHASECHK.TRYWAIT P0, [R2], R4 ;
        /*00e0*/              @!P0 BRA `(.L_x_5) ;
        /*00f0*/                   BRA `(.L_x_1) ;
.L_x_6:
        /*0100*/                   BRA `(.L_x_6);
"""


def code(**changes):
    fields = {"kernel": "attention_forward_kernel", "registers": 128, "spilled": 0}
    fields |= {"shared": 30_000, "instructions": 100, "loops": ((40, 4),), "issued": 220.0}
    return machine_code.Code(**fields | {"blocks": 1056, "warps": 4, "sines": 0} | changes)


def test_instructions_and_loops():
    listing = read_listing(LISTING)
    assert [x.split()[-1] for x in listing.instructions[-2:]] == ["`(.L_x_1)", "EXIT"]
    assert len(listing.instructions) == 6  # not what fills the code up behind its end
    assert listing.loops == [(1, 4), (2, 3)]
    assert listing.issued([5, 2]) == 6 + 4 * 4 + 5 * 2
    called = read_listing(LISTING.replace("BRA", "CALL"))
    assert called.instructions[:6] == [x.replace("BRA", "CALL") for x in listing.instructions]
    assert [x.split()[0] for x in called.instructions[6:]] == ["CALL", "NOP"]
    assert called.loops == []
    assert called.issued([]) == 8


def test_loops_in_loops_and_branches_that_warps_share():
    listing = read_listing(NESTED)
    assert listing.loops == [(1, 11), (3, 10), (4, 6)]
    counts = [1, *[2] * 2, *[2 * 3] * 1, *[2 * 3 * 5] * 3, *[2 * 3] * 4, 2, *[1] * 4]
    assert listing.issued([2, 3, 5]) == sum(counts)
    # A fourth of the warps take the branch of two instructions.
    assert (
        listing.issued([2, 3, 5], shared=Shared(loop=1, warps=4)) == sum(counts) - 2 * 3 * 2 * 3 / 4
    )


def test_loops_that_were_not_expected_are_an_error():
    listing = read_listing(LISTING)
    assert listing.issued([5, 2, 3], unrolled=1) == listing.issued([5, 2])
    for rounds, depths in (([5], None), ([5, 2, 3], None), ([5, 2], (0, 0))):
        with pytest.raises(ValueError, match=r"loops of 4, 2 instructions at the depths \[0, 1\]"):
            listing.issued(rounds, depths)
    with pytest.raises(ValueError, match="loops of no instructions"):
        read_listing(LISTING.replace("BRA", "CALL")).issued([5])


def test_jumps_back_to_one_instruction_are_one_loop():
    text = LISTING.replace("@P1 BRA `(.L_x_1)", "@P1 BRA `(.L_x_0)")
    assert read_listing(text).loops == [(2, 4)]


def test_what_stands_behind_the_end_is_no_loop():
    slow = "EXIT ;\n.L_x_3:\n        /*0060*/                   FADD R2, R2, 1 ;\n"
    slow += "        /*0070*/                   BRA `(.L_x_1) ;"
    listing = read_listing(LISTING.replace("EXIT ;", slow))
    assert len(listing.instructions) == 8
    assert listing.loops == read_listing(LISTING).loops


def test_the_time_to_issue_all_instructions():
    # Eight blocks of four warps on each of 132 multiprocessors: eight warps for each scheduler.
    assert code().issue_us(H200) == pytest.approx(8 * 220 / 1980)


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
    case = machine_code.CASES["ViT, 6 heads of 64"]
    names = [f"attention_{x}_kernel" for x in ("forward", "query", "key")]
    rows = machine_code.rows_of("ViT", [code(kernel=x) for x in names], case)
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    assert rows[1]["issue_us"] == pytest.approx(2 * rows[0]["issue_us"])
    assert rows[1]["copy_us"] == 2 * rows[0]["copy_us"]
    logits = 256 * 6 * 197**2
    assert rows[0]["instructions_per_logit"] == 32 * 4 * 1056 * 220 / logits
    lines = machine_code.table({"rows": rows}).splitlines()
    assert lines[2].startswith("| H200 | ViT, batch 256 | forward | 0.89 | 36 |")
    assert lines[-1].startswith("|  |  |  |  |  |  | key | 100 (40 x 4) | 128 | 0 | 16 |")
