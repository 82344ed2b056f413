"""Every kind of error is found where it is planted in a correct kernel, and nothing without it."""

import dataclasses

import numpy as np
import pytest

from tests.ptx import machine
from tests.ptx.launch import Tensor
from tests.ptx.snippets import run


@dataclasses.dataclass(frozen=True)
class Snippet:
    """A correct kernel, and its launch and result.

    Attributes:
        body: its instructions.
        x: the input.
        expected: the output.
        launch: keywords of `run`.
    """

    body: str
    x: np.ndarray
    expected: np.ndarray
    launch: dict = dataclasses.field(default_factory=dict)

    def run(self, body):
        like = WORDS if self.x is MAP else self.expected
        return run(body, self.x, like.shape, like.dtype, **self.launch)


WORDS = np.arange(64, dtype=np.uint32)
MAP, INSIDE = np.arange(240, dtype=np.uint32).reshape(6, 40), np.zeros((6, 40), np.uint32)
INSIDE[3:, 16:] = 1

# Two warps exchange words through shared memory, twice in the same place.
EXCHANGE = Snippet(
    """
    ld.global.b32 %r4, [%d3];
    st.shared.b32 [%r3], %r4;
    bar.sync 0;  // 1
    xor.b32 %r5, %r1, 128;
    add.s32 %r5, %r2, %r5;
    ld.shared.b32 %r6, [%r5];
    bar.sync 0;  // 2
    add.s32 %r6, %r6, 1;
    st.shared.b32 [%r3], %r6;
    bar.sync 0;  // 3
    ld.shared.b32 %r7, [%r5];
    setp.lt.u32 %p1, %r0, 64;
    @%p1 st.global.b32 [%d4], %r7;
    """,
    WORDS,
    WORDS + 1,
)
# The same with 64 lanes' guards: the array has 50 words.
GUARDED = Snippet(
    """
    mov.b32 %r4, 0;
    setp.lt.u32 %p1, %r0, 50;
    @%p1 ld.global.b32 %r4, [%d3];
    @%p1 st.global.b32 [%d4], %r4;
    """,
    WORDS[:50],
    WORDS[:50],
)
# Lanes of a warp exchange words.
LANES = Snippet(
    """
    ld.global.b32 %r4, [%d3];
    st.shared.b32 [%r3], %r4;
    bar.warp.sync -1;  // 1
    xor.b32 %r5, %r1, 64;
    add.s32 %r5, %r2, %r5;
    ld.shared.b32 %r6, [%r5];
    bar.warp.sync -1;  // 2
    st.shared.b32 [%r3], %r6;
    bar.warp.sync -1;  // 3
    ld.shared.b32 %r6, [%r5];
    st.global.b32 [%d4], %r6;
    """,
    WORDS,
    WORDS,
)
# Two blocks, each with a half of the words; a warp reads and replaces what the other one wrote.
BLOCKS = Snippet(
    """
    mov.u32 %r4, %ctaid.x;
    mul.wide.u32 %d5, %r4, 256;
    add.s64 %d6, %d3, %d5;
    ld.global.b32 %r6, [%d6];
    add.s64 %d7, %d4, %d5;
    st.global.b32 [%d7], %r6;
    bar.sync 0;  // 1
    xor.b32 %r7, %r1, 128;
    cvt.u64.u32 %d8, %r7;
    add.s64 %d8, %d1, %d8;
    add.s64 %d8, %d8, %d5;
    ld.global.b32 %r8, [%d8];
    bar.sync 0;  // 2
    st.global.b32 [%d7], %r8;
    """,
    np.arange(128, dtype=np.uint32),
    np.arange(128, dtype=np.uint32).reshape(2, 2, 32)[:, ::-1].copy().reshape(-1),
    {"grid": (2,)},
)
# Asynchronous copies of threads, in two groups.
COPIES = Snippet(
    """
    cp.async.ca.shared.global [%r3], [%d3], 4;
    cp.async.commit_group;
    add.s64 %d5, %d3, 256;
    cp.async.ca.shared.global [%r3+256], [%d5], 4;
    cp.async.commit_group;
    cp.async.wait_group 1;
    bar.sync 0;  // 1
    xor.b32 %r5, %r1, 128;
    add.s32 %r5, %r2, %r5;
    ld.shared.b32 %r6, [%r5];
    cp.async.wait_group 0;
    bar.sync 0;  // 2
    ld.shared.b32 %r7, [%r5+256];
    add.s32 %r6, %r6, %r7;
    st.global.b32 [%d4], %r6;
    """,
    np.arange(128, dtype=np.uint32),
    (2 * WORDS + 64).reshape(2, 32)[::-1].copy().reshape(-1),
)
# A tile of 4 x 32 of 6 x 40 words is copied in by the engine, changed, and copied out.
TILES = Snippet(
    """
    setp.eq.u32 %p1, %r0, 0;
    mov.b32 %r4, 1;
    add.s32 %r12, %r3, %r1;
    @%p1 mbarrier.init.shared.b64 [%r2+2048], %r4;
    bar.sync 0;  // 1
    mov.b64 %d5, maps;
    mov.b32 %r5, 16;
    mov.b32 %r6, 3;
    mov.b32 %r7, 0;
    mov.b32 %r8, 512;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d7, [%r2+2048], %r8;
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2],
        [%d5, {%r5, %r6}], [%r2+2048];
    {
    .reg .pred DONE;
    WAIT: mbarrier.try_wait.parity.shared.b64 DONE, [%r2+2048], %r7;
    @!DONE bra WAIT;
    }
    ld.shared.v2.b32 {%r10, %r11}, [%r12];
    add.s32 %r10, %r10, 1;
    add.s32 %r11, %r11, 1;
    st.shared.v2.b32 [%r12], {%r10, %r11};
    fence.proxy.async.shared::cta;
    bar.sync 0;  // 2
    @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d5, {%r5, %r6}], [%r2];
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group.read 0;
    bar.sync 0;  // 3
    st.shared.v2.b32 [%r12], {%r0, %r0};
    st.global.b32 [%d4], %r0;
    """,
    MAP,
    MAP + INSIDE,
    {"tensors": (Tensor(0, (6, 40), (40, 1), (4, 32), 16),)},
)


def make_product(across):
    """A [64, 64] times B [64, 32] by wgmma; B is stored by columns or, if `across`, by rows."""
    rng = np.random.default_rng(0)
    bits = lambda x: (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    x = bits(rng.normal(size=(128, 64)))
    A, B = (x.astype(np.uint32) << 16).view(np.float32).reshape(2, 64, 64)
    product = A @ (B[:, :32] if across else B[:32].T)
    thread, i = np.arange(128)[:, None], np.arange(16)[None, :]
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
    column = 8 * (i // 4) + 2 * (thread % 4) + i % 2
    results = ", ".join(f"%r{20 + i}" for i in range(16))
    distance = 2048 if across else 32  # of B from one step of 16 to the next
    products = "\n".join(
        f"""
        add.s64 %d12, %d10, {32 * step // 16};
        add.s64 %d13, %d11, {distance * step // 16};
        wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {{{results}}},
            %d12, %d13, %p{3 if step else 2}, 1, 1, 0, {int(across)};
        """
        for step in range(4)
    )
    stores = "\n".join(
        f"st.global.v4.b32 [%d5+{4 * i}], {{{', '.join(f'%r{20 + i + j}' for j in range(4))}}};"
        for i in range(0, 16, 4)
    )
    body = f"""
    setp.eq.u32 %p1, %r0, 0;
    setp.ne.u32 %p2, 0, 0;
    setp.eq.u32 %p3, 0, 0;
    mov.b32 %r4, 1;
    @%p1 mbarrier.init.shared.b64 [%r2+16384], %r4;
    bar.sync 0;  // 1
    mov.b64 %d5, maps;
    mov.b32 %r5, 0;
    mov.b32 %r6, 64;
    mov.b32 %r8, 16384;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d7, [%r2+16384], %r8;
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2],
        [%d5, {{%r5, %r5}}], [%r2+16384];
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+8192],
        [%d5, {{%r5, %r6}}], [%r2+16384];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r2+16384], %r5;
    @!%p4 bra WAIT;
    ld.shared.b32 %r9, [%r3+8192];
    st.shared.b32 [%r3+8192], %r9;
    fence.proxy.async.shared::cta;
    bar.sync 0;  // 2
    shr.u32 %r10, %r2, 4;
    cvt.u64.u32 %d8, %r10;
    or.b64 %d10, %d8, {1 << 62 | 1024 // 16 << 32};
    add.s64 %d11, %d10, {8192 // 16};
    mov.b32 %r20, 0;
    wgmma.fence.sync.aligned;
    {products}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    bar.sync 0;  // 3
    st.shared.b32 [%r3], %r0;
    mul.wide.u32 %d5, %r0, 64;
    add.s64 %d5, %d5, %d1;
    {stores}
    """
    maps = (Tensor(0, (128, 64), (64, 1), (64, 64), 128),)
    launch = {"threads": 128, "shared": 20480, "tensors": maps}
    return Snippet(body, x, product[row, column], launch)


def make_tensor_product():
    """The product of `make_product` by tcgen05, which adds it to zeros in tensor memory."""
    product = make_product(across=False)
    begin = product.body.index("shr.u32 %r10")
    stores = product.body[product.body.index("mul.wide.u32 %d5, %r0, 64;") :]
    registers = ", ".join(f"%r{20 + i}" for i in range(16))
    description = 1 << 4 | 1 << 7 | 1 << 10 | 32 // 8 << 17 | 64 // 16 << 24
    products = "\n".join(
        f"""
        add.s64 %d12, %d10, {2 * step};
        add.s64 %d13, %d11, {2 * step};
        @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r40], %d12, %d13, %r41, %p3;
        """
        for step in range(4)
    )
    body = f"""
    {product.body[:begin]}
    setp.lt.u32 %p5, %r0, 32;
    @%p5 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+16400], 32;
    @%p1 mbarrier.init.shared.b64 [%r2+16392], %r4;
    bar.sync 0;  // 4
    ld.shared.b32 %r40, [%r2+16400];
    and.b32 %r42, %r0, 96;
    shl.b32 %r42, %r42, 16;
    add.s32 %r42, %r42, %r40;
    {"".join(f"mov.b32 %r{20 + i}, 0;" for i in range(16))}
    tcgen05.st.sync.aligned.16x32bx2.x16.b32 [%r42], 16, {{{registers}}};
    tcgen05.wait::st.sync.aligned;
    bar.sync 0;  // 5
    mov.b32 %r41, {description};
    shr.u32 %r10, %r2, 4;
    cvt.u64.u32 %d8, %r10;
    or.b64 %d10, %d8, {2 << 61 | 1 << 46 | 1024 // 16 << 32};
    add.s64 %d11, %d10, {8192 // 16};
    {products}
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+16392];
    PRODUCT: mbarrier.try_wait.parity.shared.b64 %p4, [%r2+16392], %r5;
    @!%p4 bra PRODUCT;
    tcgen05.ld.sync.aligned.16x32bx2.x16.b32 {{{registers}}}, [%r42], 16;
    tcgen05.wait::ld.sync.aligned;
    bar.sync 0;  // 6
    @%p5 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r40, 32;
    {stores}
    """
    thread, i = np.arange(128)[:, None], np.arange(16)[None, :]
    whole, row = np.zeros((64, 32), np.float32), 16 * (thread // 32)
    whole[row + thread % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (thread % 4) + i % 2] = (
        product.expected
    )
    expected = whole[row + thread % 16, i + 16 * (thread % 32 // 16)]
    return Snippet(body, product.x, expected, product.launch)


PRODUCT, PRODUCT_ACROSS = make_product(across=False), make_product(across=True)
TENSOR = make_tensor_product()
SNIPPETS = {
    "exchange": EXCHANGE,
    "guarded": GUARDED,
    "lanes": LANES,
    "blocks": BLOCKS,
    "copies": COPIES,
    "tiles": TILES,
    "product": PRODUCT,
    "product across": PRODUCT_ACROSS,
    "tensor": TENSOR,
}
COMMIT = "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+16392];"
FOREVER, OUTSIDE = "threads wait for ever", "is outside of its array"
READS = "a thread reads what another writes in shared memory"
WRITES = "a thread writes what another reads in shared memory"
# Snippet -> text, what takes its place, and the finding.
MISTAKES = {
    "exchange": [
        ("bar.sync 0;  // 1", "", READS),
        ("bar.sync 0;  // 1", "bar.warp.sync -1;", READS),
        ("bar.sync 0;  // 2", "", WRITES),
        ("bar.sync 0;  // 3", "", READS),
        ("bar.sync 0;  // 1", "bar.sync 0, 96;", FOREVER),
        ("bar.sync 0;  // 1", "setp.lt.u32 %p2, %r0, 32; @%p2 bar.sync 0;", READS),
        ("bar.sync 0;  // 3", "setp.lt.u32 %p2, %r0, 9; @%p2 bar.sync 0;", "some lanes of 32 miss"),
        ("st.shared.b32 [%r3], %r4;", "", "reads shared memory that nothing has written"),
        ("st.shared.b32 [%r3], %r4;", "st.shared.b32 [%r2], %r4;", "lanes write different values"),
        (
            "ld.shared.b32 %r7, [%r5];",
            "ld.shared.b32 %r7, [%r5+4096];",
            "a shared access is outside",
        ),
        ("ld.shared.b32 %r7, [%r5];", "ld.shared.b32 %r7, [%r5+2];", "a shared access is outside"),
        ("%r0, 64;", "%r0, 63;", "the output is not written everywhere"),
        ("bar.sync 0;  // 3", "LOOP: bra LOOP;", "the kernel does not end"),
    ],
    "guarded": [
        ("@%p1 ld.global.b32 %r4, [%d3];", "ld.global.b32 %r4, [%d3];", f"a global read {OUTSIDE}"),
        ("@%p1 st.global.b32 [%d4]", "st.global.b32 [%d4]", f"a global write {OUTSIDE}"),
        ("%r0, 50", "%r0, 51", OUTSIDE),
        ("ld.global.b32 %r4, [%d3]", "ld.global.b32 %r4, [%d4]", "memory that nothing has written"),
        ("st.global.b32 [%d4]", "st.global.b32 [%d4+2]", "a global write is not aligned"),
        ("st.global.b32 [%d4]", "st.global.b32 [%d4+-4]", f"a global write {OUTSIDE}"),
    ],
    "lanes": [
        ("bar.warp.sync -1;  // 1", "", READS),
        ("bar.warp.sync -1;  // 2", "", WRITES),
        ("bar.warp.sync -1;  // 3", "", READS),
    ],
    "blocks": [
        ("mul.wide.u32 %d5, %r4, 256;", "mov.b64 %d5, 0;", "two blocks write one place"),
        ("add.s64 %d8, %d8, %d5;", "", "a block reads what another block writes"),
        ("bar.sync 0;  // 1", "", "a warp reads what another writes in global memory"),
        ("bar.sync 0;  // 2", "", "a warp writes what another accesses in global memory"),
    ],
    "copies": [
        ("cp.async.wait_group 1;", "", READS),
        ("cp.async.wait_group 0;", "", READS),
        ("cp.async.wait_group 0;", "", "a block ends while a copy uses its shared memory"),
        ("cp.async.wait_group 1;", "cp.async.wait_group 2;", READS),
        ("bar.sync 0;  // 1", "", READS),
        ("%d5, %d3, 256;\n", "%d5, %d3, 260;\n", f"a global read {OUTSIDE}"),
    ],
    "tiles": [
        (
            "mbarrier.try_wait.parity.shared.b64 DONE, [%r2+2048], %r7;",
            "setp.eq.u32 DONE, 0, 0;",
            READS,
        ),
        ("mov.b32 %r7, 0;", "mov.b32 %r7, 1;", READS),
        ("mov.b32 %r8, 512;", "mov.b32 %r8, 1024;", FOREVER),
        ("mov.b32 %r8, 512;", "mov.b32 %r8, 256;", FOREVER),
        ("mov.b32 %r4, 1;", "mov.b32 %r4, 2;", FOREVER),
        ("bar.sync 0;  // 1", "", "a warp uses an mbarrier that another makes"),
        ("@%p1 mbarrier.init", "@%p2 mbarrier.init", "an mbarrier is used that nothing has made"),
        ("fence.proxy.async.shared::cta;", "", "written without a fence.proxy.async"),
        ("bar.sync 0;  // 2", "", "the copy engine reads what another writes in shared memory"),
        ("@%p1 cp.async.bulk.wait_group.read 0;", "", "writes what a unit still reads"),
        ("@%p1 cp.async.bulk.commit_group;", "", "a block ends while a copy"),
        ("bar.sync 0;  // 3", "", WRITES),
        (
            ".bulk_group [%d5, {%r5, %r6}], [%r2];",
            ".bulk_group [%d5, {%r5, %r6}], [%r2+64];",
            "128 bytes",
        ),
    ],
    "product": [
        ("wgmma.fence.sync.aligned;", "", "registers of wgmma have changed since wgmma.fence"),
        (
            "wgmma.wait_group.sync.aligned 0;",
            "",
            "registers of a matrix product are accessed before",
        ),
        (
            "wgmma.wait_group.sync.aligned 0;",
            "wgmma.wait_group.sync.aligned 1;",
            "a block ends while",
        ),
        ("wgmma.commit_group.sync.aligned;", "", "writes what a unit still reads in shared memory"),
        ("fence.proxy.async.shared::cta;", "", "written without a fence.proxy.async"),
        ("bar.sync 0;  // 2", "", "a matrix product reads what another writes in shared memory"),
        ("bar.sync 0;  // 3", "", WRITES),
        (
            "cvt.u64.u32 %d8, %r10;",
            "add.s32 %r10, %r10, %r0; cvt.u64.u32 %d8, %r10;",
            "descriptors",
        ),
        ("add.s64 %d11, %d10, 512;", "add.s64 %d11, %d10, 1024;", "that nothing has written"),
    ],
    "tensor": [
        (COMMIT, "", FOREVER),
        (
            "%p4, [%r2+16392], %r5;",
            "%p4, [%r2+16384], %r5;",
            "tensor memory is accessed that another",
        ),
        ("tcgen05.wait::st.sync.aligned;", "", "tensor memory is accessed that another writes"),
        ("bar.sync 0;  // 5", "", "tensor memory is accessed that another writes"),
        (
            "@%p5 tcgen05.dealloc",
            "@%p2 tcgen05.dealloc",
            "a block ends with tensor memory allocated",
        ),
        ("[%r2+16400], 32;", "[%r2+16400], 16;", "tensor memory is used that is not allocated"),
        ("add.s32 %r42, %r42, %r40;", "mov.b32 %r42, %r40;", "a warp accesses lanes of another"),
        ("fence.proxy.async.shared::cta;", "", "written without a fence.proxy.async"),
    ],
}


@pytest.mark.parametrize("name", SNIPPETS)
def test_correct_kernels_have_no_findings(name):
    snippet = SNIPPETS[name]
    out, left, findings = snippet.run(snippet.body)
    assert not findings, str(findings)
    result = left if name == "tiles" else out
    np.testing.assert_allclose(result, snippet.expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "text", "mistake", "finding"),
    [(name, *mistake) for name, mistakes in MISTAKES.items() for mistake in mistakes],
)
def test_planted_mistakes_are_found(name, text, mistake, finding, monkeypatch):
    monkeypatch.setattr(machine, "MOST_STEPS", 10_000)
    snippet = SNIPPETS[name]
    assert text in snippet.body
    _, _, findings = snippet.run(snippet.body.replace(text, mistake, 1))
    assert finding in str(findings)


def test_unknown_instructions_are_refused():
    with pytest.raises(NotImplementedError, match=r"kernel, line \d+: frobnicate"):
        GUARDED.run("frobnicate.b32 %r4, %r5;")
