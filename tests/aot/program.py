"""A program compiled for a GPU that may be absent: its launches, buffers and Pallas kernels."""

import dataclasses
import importlib.util
import math
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.memory import OPTIONS

# Custom-call targets of Pallas kernels, by backend.
TARGETS = {"triton": "__gpu$xla.gpu.triton", "mosaic": "mosaic_gpu_v2"}
# Operations that take no time on a GPU.
FREE = {"parameter", "bitcast", "tuple", "get-tuple-element", "constant", "copy-done", "after-all"}
COLLECTIVE = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-(?:permute|broadcast)"
HEADER = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$", re.M)
INSTRUCTION = re.compile(
    r"^ +(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\((.*?)\)(.*)$", re.M
)
_PINNED = (pathlib.Path(__file__).parents[2] / "constraints.txt").read_text()


def budget(most: float, *, elsewhere: float = math.inf) -> float:
    """The limit of instructions, registers or spilled bytes, with the jax of constraints.txt.

    Any other jax, whose compilers generate other code, has the limit `elsewhere`.
    """
    return most if f"jax=={jax.__version__}" in _PINNED.splitlines() else elsewhere


def sizes(shape: str) -> list[int]:
    """Bytes of each array in an HLO type, which is an array or a tuple."""
    arrays = re.findall(r"\b([a-z]+)(\d*)\[([\d,]*)\]", shape)
    return [
        int(bits or 8) // 8 * math.prod(int(n) for n in extents.split(",") if n)
        for _, bits, extents in arrays
    ]


@dataclasses.dataclass(frozen=True)
class Launch:
    """An operation that takes time: its HLO name, or a custom call's target.

    `bytes` are those of its operands and results, each array once.
    """

    kind: str
    bytes: int
    times: int = 1


def launches(text: str, computation: str | None = None, times: int = 1) -> list[Launch]:
    """The launches of the entry of a program, or of another computation.

    The body of a loop counts as often as it runs.
    """
    headers = list(HEADER.finditer(text))
    start = next(x.end() for x in headers if (x[2] == computation if computation else x[1]))
    instructions = INSTRUCTION.findall(text[start : text.index("\n}", start)])
    types, launched = {name: shape for name, shape, *_ in instructions}, []
    for _, shape, operation, operands, attributes in instructions:
        if operation in ("while", "call"):
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', attributes)
            called = re.search(r"(?:body|to_apply)=%([\w.-]+)", attributes)[1]
            launched += launches(text, called, times * int(trips[1] if trips else 1))
        elif operation not in FREE:
            target = re.search(r'custom_call_target="([^"]*)"', attributes)
            read = {name: types[name] for name in re.findall(r"%([\w.-]+)", operands)}
            moved = sum(sum(sizes(x)) for x in (shape, *read.values()))
            launched.append(Launch(target[1] if target else operation, moved, times))
    return launched


def tool(name: str) -> str | None:
    """The path of ptxas or nvdisasm in the nvidia wheels or on PATH, or None."""
    wheel = importlib.util.find_spec("nvidia")
    for root in wheel.submodule_search_locations if wheel else ():
        for path in pathlib.Path(root).glob(f"*/bin/{name}"):
            return str(path)
    return shutil.which(name)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel as ptxas sees it; widths are bytes of one thread's access."""

    name: str
    registers: int
    local_bytes: int  # stack frame and spills
    spilled_bytes: int
    load_widths: frozenset[int]  # from global memory
    store_widths: frozenset[int]
    shared_widths: frozenset[int]  # to and from shared memory
    tensors_out: int  # writes of tiles by the copy engine, which clips them to the array
    runs_out: int  # writes of runs of bytes by the copy engine, which it does not clip
    ptx: str
    cubin: pathlib.Path

    def instructions(self) -> list[str]:
        """The machine code, without the jump to itself and the NOPs after its end."""
        command = [tool("nvdisasm"), str(self.cubin)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", listing, re.M)
        while code[-1] == "NOP":
            code.pop()
        return code[:-1] if re.match(r"BRA\b", code[-1]) else code


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
        """The number of launches of Pallas kernels."""
        return sum(self.operations.count(target) for target in TARGETS.values())


def collectives(text: str) -> list[tuple[str, int]]:
    """The name of each collective operation, and bytes per device of its largest array."""
    operations = re.findall(rf"%\S+ = (\(.*?\)|\S+) ({COLLECTIVE})(?:-start)?\(", text)
    return [(kind, max(sizes(shape))) for shape, kind in operations]


def compile_ahead(f, shapes, device, donate=(), options=None) -> jax.stages.Compiled:
    """Compiles f for one GPU; `shapes` are trees of `jax.ShapeDtypeStruct`, one per argument."""
    mesh = Mesh(np.array([device]), ("data",))
    return _compile(f, shapes, mesh, [PartitionSpec()] * len(shapes), donate, options or {})


def _compile(f, shapes, mesh, specs, donate, options) -> jax.stages.Compiled:
    def place(spec, tree):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    arguments = map(place, specs, shapes)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(f, donate_argnums=donate).trace(*arguments).lower()
        return lowered.compile(compiler_options=OPTIONS | options)


def compile_program(gpus, mesh_shape, folder, f, shapes, *, specs=None, donate=()) -> Program:
    """Compiles f for arguments of `shapes`, sharded over GPUs by `specs` or replicated."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=folder))  # one for each program of a test
    mesh = Mesh(np.array(gpus[: math.prod(mesh_shape)]).reshape(mesh_shape), ("data", "heads"))
    specs = specs or [PartitionSpec()] * len(shapes)
    # Only PTX is dumped: printing the stages of Triton's compiler takes ten times as long as
    # running them.
    dump = {"xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx"}
    with mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=str(folder)):
        compiled = _compile(f, shapes, mesh, specs, donate, dump)
    text = compiled.as_text()
    kernels = [
        read_kernel(path)
        for path in sorted(folder.glob("*.ptx"))
        if re.search("rotary|attention", path.read_text())
    ]
    aliased = compiled.memory_analysis().alias_size_in_bytes
    return Program([x.kind for x in launches(text)], text, aliased, kernels)


def read_kernel(path: pathlib.Path) -> Kernel:
    """Assembles one PTX file."""
    ptx, cubin = path.read_text(), path.with_suffix(".cubin")
    target = re.search(r"\.target (\w+)", ptx)[1]
    command = [tool("ptxas"), f"-arch={target}", "-v", str(path), "-o", str(cubin)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    number = lambda pattern: sum(int(x) for x in re.findall(pattern, report))
    accesses = re.findall(
        r"\b((?:ld|st)\.(?:global|shared))(?:\.[a-z:0-9_]+?)*?(?:\.v(\d))?\.[bfus](\d+)\s", ptx
    )
    width = lambda *kinds: frozenset(
        int(vector or 1) * int(bits) // 8 for op, vector, bits in accesses if op in kinds
    )
    copies = re.findall(r"\bcp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (\w+)", ptx)
    asynchronous = {int(size, 0) for size in copies}
    return Kernel(
        name=re.search(r"\.entry (\w+)", ptx)[1],
        registers=number(r"Used (\d+) registers"),
        local_bytes=number(r"(\d+) bytes (?:stack frame|spill stores|spill loads)"),
        spilled_bytes=number(r"(\d+) bytes (?:spill stores|spill loads)"),
        load_widths=width("ld.global") | asynchronous,
        store_widths=width("st.global"),
        shared_widths=width("ld.shared", "st.shared"),
        tensors_out=len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.global", ptx)),
        runs_out=len(re.findall(r"cp\.async\.bulk\.global", ptx)),
        ptx=ptx,
        cubin=cubin,
    )
