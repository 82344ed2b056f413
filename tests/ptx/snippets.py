"""Small kernels for the emulator's tests: a few instructions between a fixed head and end."""

from tests.ptx.launch import Launch, Partial, emulate
from tests.ptx.order import Findings

HEAD = """
.visible .entry kernel({parameters})
.reqntid {threads}
{{
    .shared .align 1024 .b8 tile[{shared}];
    .reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<128>; .reg .b64 %d<32>;
    ld.param.b64 %d0, [{first}];  // the input; with tensor maps, the output
    ld.param.b64 %d1, [output];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %d2, %r0, 4;
    add.s64 %d3, %d0, %d2;  // four bytes of the input and of the output, by thread
    add.s64 %d4, %d1, %d2;
    shl.b32 %r1, %r0, 2;
    mov.b32 %r2, tile;
    add.s32 %r3, %r2, %r1;  // four bytes of shared memory, by thread
"""


def run(body, x, shape, dtype, *, threads=64, grid=(1,), shared=4096, tensors=()):
    """Emulates `body` with an input x, which has a pointer or tensor maps, and an output.

    Returns the output, the input as it is left, and the findings.
    """
    launch, findings = make_launch(body, shape, dtype, threads, grid, shared, tensors), Findings()
    out, left = emulate(launch, [x], findings)
    findings.add(isinstance(out, Partial), "the output is not written everywhere", "the end")
    out = out.value if isinstance(out, Partial) else out
    return out, left, findings


def make_launch(body, shape, dtype, threads=64, grid=(1,), shared=4096, tensors=()):
    """The kernel of `body`, and how it is launched; see `run`."""
    maps = f", .param .align 64 .b8 maps[{128 * len(tensors)}]"
    parameters = ".param .u64 output" + (maps if tensors else "")
    if not tensors:
        parameters = ".param .u64 x, " + parameters
    first = "output" if tensors else "x"
    head = HEAD.format(parameters=parameters, first=first, threads=threads, shared=shared)
    ptx, outputs = head + body + "\n ret;\n}\n", ((shape, dtype),)
    return Launch(ptx, grid, threads, shared, outputs, mutable=(0,), tensors=tensors)
