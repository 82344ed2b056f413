"""What instructions compute, against values from the PTX manual's definitions."""

import struct

import numpy as np
import pytest

from tests.ptx.launch import count_issued, read_program
from tests.ptx.snippets import make_launch, run


def bits_of(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


F = bits_of
NAN, INF = 0x7FC00000, F(float("inf"))

# Instruction on registers that hold the given words -> the word in its result.
CASES = [
    ("add.s32 %r9, %r4, %r5;", (7, -9), -2),
    ("sub.s32 %r9, %r4, %r5;", (0, 1), -1),
    ("mul.lo.s32 %r9, %r4, %r5;", (-3, 5), -15),
    ("mul.hi.u32 %r9, %r4, %r5;", (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFE),
    ("mul.hi.s32 %r9, %r4, %r5;", (-1, 3), -1),
    ("mad.lo.s32 %r9, %r4, %r5, %r6;", (-3, 5, 20), 5),
    ("div.s32 %r9, %r4, %r5;", (-7, 2), -3),
    ("div.u32 %r9, %r4, %r5;", (7, 2), 3),
    ("min.s32 %r9, %r4, %r5;", (-7, 2), -7),
    ("min.u32 %r9, %r4, %r5;", (-7, 2), 2),
    ("and.b32 %r9, %r4, %r5;", (12, 10), 8),
    ("or.b32 %r9, %r4, %r5;", (12, 10), 14),
    ("xor.b32 %r9, %r4, %r5;", (12, 10), 6),
    ("not.b32 %r9, %r4;", (0,), -1),
    ("neg.s32 %r9, %r4;", (5,), -5),
    ("shl.b32 %r9, %r4, %r5;", (1, 31), 1 << 31),
    ("shl.b32 %r9, %r4, %r5;", (1, 32), 0),
    ("shr.u32 %r9, %r4, %r5;", (-8, 1), 0x7FFFFFFC),
    ("shr.s32 %r9, %r4, %r5;", (-8, 40), -1),
    ("bfe.u32 %r9, %r4, 4, 8;", (0xABCDE,), 0xCD),
    ("bfe.s32 %r9, %r4, 4, 8;", (0xABCDE,), 0xCD - 256),
    ("add.rn.f32 %r9, %r4, %r5;", (F(1.5), F(2.25)), F(3.75)),
    ("fma.rn.f32 %r9, %r4, %r5, %r6;", (F(1 + 2**-23), F(1 - 2**-23), F(-1.0)), F(-(2**-46))),
    ("mul.ftz.f32 %r9, %r4, %r5;", (F(2**-80), F(2**-60)), 0),
    ("max.f32 %r9, %r4, %r5;", (NAN, F(2.0)), F(2.0)),
    ("max.NaN.f32 %r9, %r4, %r5;", (NAN, F(2.0)), NAN),
    ("max.f32 %r9, %r4, %r5, %r6;", (F(1.0), F(2.0), F(3.0)), F(3.0)),
    ("neg.f32 %r9, %r4;", (F(0.0),), F(-0.0)),
    ("ex2.approx.ftz.f32 %r9, %r4;", (F(-1.0),), F(0.5)),
    ("lg2.approx.f32 %r9, %r4;", (F(8.0),), F(3.0)),
    ("rcp.approx.ftz.f32 %r9, %r4;", (F(4.0),), F(0.25)),
    ("div.full.f32 %r9, %r4, %r5;", (F(1.0), F(4.0)), F(0.25)),
    ("cvt.rmi.f32.f32 %r9, %r4;", (F(-1.5),), F(-2.0)),
    ("cvt.rzi.s32.f32 %r9, %r4;", (F(-1.5),), -1),
    ("cvt.rni.s32.f32 %r9, %r4;", (F(2.5),), 2),
    ("cvt.rzi.s32.f32 %r9, %r4;", (F(3e9),), 2**31 - 1),
    ("cvt.rzi.s32.f32 %r9, %r4;", (NAN,), 0),
    ("cvt.rn.f32.s32 %r9, %r4;", (-3,), F(-3.0)),
    ("cvt.rn.bf16x2.f32 %r9, %r4, %r5;", (F(1.0), F(1 + 3 * 2**-8)), 0x3F803F82),
    ("cvt.rn.f16x2.f32 %r9, %r4, %r5;", (F(1.0), F(-2.0)), 0x3C00C000),
    ("cvt.rn.bf16.f32 %h0, %r4; cvt.f32.bf16 %r9, %h0;", (F(1 + 2**-8),), F(1.0)),
    ("cvt.u16.u32 %h0, %r4; cvt.s32.s16 %r9, %h0;", (0x1FFFE,), -2),
    ("mov.b32 {%h0, %h1}, %r4; mov.b32 %r9, {%h1, %h0};", (0x11223344,), 0x33441122),
    ("mov.b64 %d9, {%r4, %r5}; shr.u64 %d9, %d9, 16; cvt.u32.u64 %r9, %d9;", (1 << 31, 3), 0x38000),
    ("mul.wide.s32 %d9, %r4, %r5; shr.u64 %d9, %d9, 32; cvt.u32.u64 %r9, %d9;", (-1, 1), -1),
    ("bfe.u64 %d9, -1, 4, 14; cvt.u32.u64 %r9, %d9;", (), (1 << 14) - 1),
    ("mul.hi.u64 %d9, -1, -1; cvt.u32.u64 %r9, %d9;", (), -2),
    (
        "mov.b64 %d9, {%r4, %r5}; add.rn.f32x2 %d9, %d9, %d9; mov.b64 {%r8, %r9}, %d9;",
        (F(1.0), F(3.0)),
        F(6.0),
    ),
]
# Comparison -> whether it is true.
COMPARISONS = [
    ("setp.lt.s32", -1, 0, True),
    ("setp.lt.u32", -1, 0, False),
    ("setp.eq.f32", NAN, NAN, False),
    ("setp.ne.f32", NAN, F(0.0), False),
    ("setp.neu.f32", NAN, F(0.0), True),
    ("setp.geu.f32", F(1.0), F(2.0), False),
    ("setp.num.f32", INF, F(0.0), True),
    ("setp.nan.f32", NAN, F(0.0), True),
]


def word(text, registers):
    """The word that a snippet leaves in %r9 of every thread."""
    sets = "".join(f"mov.b32 %r{4 + i}, {x & 0xFFFFFFFF:#x};" for i, x in enumerate(registers))
    x = np.zeros(1, np.uint32)
    out, _, findings = run(f"{sets} {text} st.global.b32 [%d4], %r9;", x, (64,), np.uint32)
    assert not findings, str(findings)
    assert (out == out[0]).all()
    return int(out[0])


@pytest.mark.parametrize(("text", "registers", "expected"), CASES)
def test_results(text, registers, expected):
    assert word(text, registers) == expected & 0xFFFFFFFF


@pytest.mark.parametrize(("name", "a", "b", "expected"), COMPARISONS)
def test_comparisons(name, a, b, expected):
    assert word(f"{name} %p0, %r4, %r5; selp.b32 %r9, 1, 0, %p0;", (a, b)) == expected


def test_comparisons_are_joined_with_predicates():
    text = "setp.eq.s32 %p0, 0, 1; setp.lt.or.s32 %p1, %r4, %r5, !%p0; selp.b32 %r9, 1, 0, %p1;"
    assert word(text, (2, 1)) == 1


LANE = np.arange(64) % 32
SHUFFLES = [
    ("bfly.b32 %r9, %r0, 5, 31", np.arange(64) ^ 5),
    ("idx.b32 %r9, %r0, 3, 31", np.arange(64) - LANE + 3),
    ("down.b32 %r9, %r0, 4, 31", np.arange(64) + np.where(LANE < 28, 4, 0)),
    ("up.b32 %r9, %r0, 4, 0", np.arange(64) - np.where(LANE >= 4, 4, 0)),
    # Segments of eight lanes.
    ("idx.b32 %r9, %r0, 9, 6151", np.arange(64) // 8 * 8 + 1),
]


@pytest.mark.parametrize(("text", "expected"), SHUFFLES)
def test_shuffles(text, expected):
    body = f"shfl.sync.{text}, -1; st.global.b32 [%d4], %r9;"
    out, _, findings = run(body, np.zeros(1, np.uint32), (64,), np.uint32)
    assert not findings, str(findings)
    np.testing.assert_array_equal(out, expected)


def test_branches_come_together():
    body = """
        setp.lt.u32 %p0, %r0, 10;
        mov.b32 %r9, 0;
    AGAIN:
        add.s32 %r9, %r9, 1;
        setp.lt.u32 %p1, %r9, %r0;
        @%p1 bra AGAIN;
        @%p0 bra LEAVE;
        add.s32 %r9, %r9, 100;
    LEAVE:
        bar.sync 0;
        st.global.b32 [%d4], %r9;
    """
    out, _, findings = run(body, np.zeros(1, np.uint32), (64,), np.uint32)
    assert not findings, str(findings)
    thread = np.arange(64)
    np.testing.assert_array_equal(out, np.maximum(thread, 1) + np.where(thread < 10, 0, 100))


def test_issued_instructions():
    """Of blocks 0 to 3, of which 1 and 3 are counted, and of their two warps."""
    body = """
        mov.u32 %r4, %ctaid.x;
    AGAIN:
        add.s32 %r4, %r4, -1;  // as often as its number, at least once
        setp.gt.s32 %p0, %r4, 0;
        @%p0 bra AGAIN;
        setp.gt.u32 %p1, %r0, 20;
        @%p1 bra LEAVE;
        add.s32 %r5, %r5, 7;  // by some lanes of one warp
    LEAVE:
        @!%p1 st.global.b32 [%d4], %r4;  // also by the warp that it does nothing for
    """
    launch = make_launch(body, (64,), np.uint32, grid=(4,))
    times = count_issued(launch, [np.zeros(1, np.uint32)], sample=2)
    code = {x.line: " ".join([x.name, *x.operands]) for x in read_program(launch.ptx).kernel.code}
    counted = {code[line]: n for line, n in times.items()}
    assert counted["mov.u32 %r4 %ctaid.x"] == 2
    assert counted["add.s32 %r4 %r4 -1"] == 2 * (1 + 3) / 2
    assert counted["add.s32 %r5 %r5 7"] == 1
    assert counted["st.global.b32 [%d4] %r4"] == 2
