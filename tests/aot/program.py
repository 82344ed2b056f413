"""The operations, buffers and Pallas kernels of a program compiled for a GPU."""

import dataclasses
import math
import os
import pathlib
import re
import subprocess
import tempfile
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks._hlo import FREE, text_of

# Custom-call targets of Pallas kernels, by backend.
TARGETS = {"triton": "__gpu$xla.gpu.triton", "mosaic": "mosaic_gpu_v2"}


_PINNED = (pathlib.Path(__file__).parents[2] / "constraints.txt").read_text()


def budget(most: float, *, elsewhere: float = math.inf) -> float:
    """The most instructions, registers or spilled bytes, with the jax of constraints.txt.

    Any other jax, whose compilers write other code, may take as many as `elsewhere`.
    """
    return most if f"jax=={jax.__version__}" in _PINNED.splitlines() else elsewhere


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel as ptxas sees it; widths are bytes of one thread's access."""

    registers: int
    local_bytes: int  # stack frame and spills
    spilled_bytes: int
    load_widths: frozenset[int]  # from global memory
    store_widths: frozenset[int]
    shared_widths: frozenset[int]  # to and from shared memory
    tensors_out: int  # writes of tiles by the copy engine, which clips them to the array
    runs_out: int  # writes of runs of bytes by the copy engine, which it does not clip
    ptx: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    `operations` are those of the entry computation, a custom call by its target.
    """

    operations: list[str]
    text: str
    aliased_bytes: int
    kernels: list[Kernel]

    def launches(self) -> int:
        """How many Pallas kernels run."""
        return sum(self.operations.count(target) for target in TARGETS.values())


def compile_program(
    gpus, mesh_shape, folder, ptxas, f, shapes, *, specs=None, donate=()
) -> Program:
    """Compiles f for arguments of `shapes`, sharded over GPUs by `specs` or replicated."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=folder))  # one for each program of a test
    mesh = Mesh(np.array(gpus[: math.prod(mesh_shape)]).reshape(mesh_shape), ("data", "heads"))
    specs = specs or [PartitionSpec()] * len(shapes)
    arguments = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(shapes, specs, strict=True)
    ]
    # Autotuning would need the GPU. Only PTX is dumped: printing the stages of Triton's compiler
    # takes ten times as long as running them.
    options = {
        "xla_dump_to": str(folder),
        "xla_dump_emitter_re": "ptx",
        "xla_gpu_autotune_level": "0",
        "xla_gpu_enable_triton_gemm": False,
    }
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=str(folder)),
    ):
        compiled = (
            jax.jit(f, donate_argnums=donate)
            .trace(*arguments)
            .lower()
            .compile(compiler_options=options)
        )
    text = text_of(compiled)
    entry = text[text.index("ENTRY") :]
    operations = []
    for line in entry.splitlines():
        # `%name = type operation(...)`, where the type may be a tuple in parentheses.
        if found := re.match(r"\s+(?:ROOT )?%\S+ = (?:\(.*?\) |\S+ )([a-z][a-z0-9-]*)\(", line):
            target = re.search(r'custom_call_target="([^"]*)"', line)
            operations.append(target[1] if target else found[1])
    kernels = [
        read_kernel(path, ptxas)
        for path in sorted(folder.glob("*.ptx"))
        if re.search("rotary|attention", path.read_text())
    ]
    return Program(
        [x for x in operations if x not in FREE],
        text,
        compiled.memory_analysis().alias_size_in_bytes,
        kernels,
    )


def read_kernel(path, ptxas) -> Kernel:
    """Assembles one PTX file."""
    command = [ptxas, "-arch=sm_90a", "-v", str(path), "-o", str(path.with_suffix(".cubin"))]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    number = lambda pattern: sum(int(x) for x in re.findall(pattern, report))
    ptx = path.read_text()
    accesses = re.findall(
        r"\b((?:ld|st)\.(?:global|shared))(?:\.[a-z:0-9_]+?)*?(?:\.v(\d))?\.[bfus](\d+)\s", ptx
    )
    width = lambda *kinds: frozenset(
        int(vector or 1) * int(bits) // 8 for op, vector, bits in accesses if op in kinds
    )
    copies = re.findall(r"\bcp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (\w+)", ptx)
    asynchronous = {int(size, 0) for size in copies}
    return Kernel(
        registers=number(r"Used (\d+) registers"),
        local_bytes=number(r"(\d+) bytes (?:stack frame|spill stores|spill loads)"),
        spilled_bytes=number(r"(\d+) bytes (?:spill stores|spill loads)"),
        load_widths=width("ld.global") | asynchronous,
        store_widths=width("st.global"),
        shared_widths=width("ld.shared", "st.shared"),
        tensors_out=len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.global", ptx)),
        runs_out=len(re.findall(r"cp\.async\.bulk\.global", ptx)),
        ptx=ptx,
    )
