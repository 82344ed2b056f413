"""A program compiled for a GPU that may be absent: its launches, buffers and Pallas kernels."""

import concurrent.futures
import dataclasses
import importlib.util
import math
import multiprocessing
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
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
INSTRUCTION = re.compile(r"^ +(ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\((.*?)\)(.*)$", re.M)
# In a listing: the line of the PTX that instructions come from, and an instruction.
LISTED = r'"\.nv_debug_ptx_txt", line (\d+)|^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;'
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
class Instruction:
    """An instruction of HLO; `operands` are the text in its brackets, attributes follow."""

    root: str
    name: str
    shape: str
    kind: str
    operands: str
    attributes: str

    def reads(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.operands)

    def named(self, attribute: str) -> str | None:
        found = re.search(rf"{attribute}=[%\"]?([\w.$-]+)", self.attributes)
        return found and found[1]

    def size(self) -> int:
        """Bytes of the result, without the workspace of cuBLAS, which is the only array of s8."""
        return sum(sizes(re.sub(r"\bs8\[\d+\]", "", self.shape)))


Computation = dict[str, Instruction]  # by name


def read_computations(text: str) -> dict[str, Computation]:
    """The computations of a program in HLO by name; that of the entry is ""."""
    computations = {}
    for header in HEADER.finditer(text):
        body = text[header.end() : text.index("\n}", header.end())]
        instructions = [Instruction(*fields) for fields in INSTRUCTION.findall(body)]
        computations["" if header[1] else header[2]] = {x.name: x for x in instructions}
    return computations


@dataclasses.dataclass(frozen=True)
class Launch:
    """An operation that takes time: its HLO name, or a custom call's target.

    `bytes` are those that it reads and writes: each array once, of slices what they hold, and of
    slices that are updated in place the update.
    """

    kind: str
    bytes: int
    times: int = 1


def launches(text: str) -> list[Launch]:
    """The launches of a program; those of the body of a loop count as often as it runs."""
    computations = read_computations(text)

    def find(name: str, times: int) -> Iterator[Launch]:
        for x in computations[name].values():
            if x.kind in ("while", "call"):
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', x.attributes)
                called = x.named("body") or x.named("to_apply")
                yield from find(called, times * int(trips[1] if trips else 1))
            elif x.kind not in FREE and not x.kind.endswith("-done"):
                kind = x.named("custom_call_target") or x.kind.removesuffix("-start")
                yield Launch(kind, _bytes_moved(computations, computations[name], x), times)

    return list(find("", 1))


def _bytes_moved(computations: dict[str, Computation], caller: Computation, x: Instruction) -> int:
    if x.kind in ("fusion", "fusion-start"):
        inside = computations[x.named("calls")]
        parameters = [y for y in inside.values() if y.kind == "parameter"]
        parameters = [y.name for y in sorted(parameters, key=lambda y: int(y.operands))]
        last = next(y for y in inside.values() if y.root)
    else:
        inside, parameters, last = {x.name: x}, x.reads(), x
    moved = _bytes_written(inside, caller, last)
    arrays = {}
    for parameter, name in zip(parameters, x.reads(), strict=True):
        array = _find_array(caller, name)
        read = _bytes_read(inside, parameter, caller[name].size())
        arrays[array] = min(arrays.get(array, 0) + read, caller[name].size())
    return moved + sum(arrays.values())


def _find_array(body: Computation, name: str) -> tuple[str, ...]:
    """The identity of an array, the same for all its views."""
    x = body[name]
    if x.kind not in ("bitcast", "get-tuple-element"):
        return (name,)
    return (*_find_array(body, *x.reads()), *filter(None, [x.named("index")]))


def _bytes_read(inside: Computation, name: str, size: int) -> int:
    read = 0
    for use in inside.values():
        operands = use.reads()
        if name not in operands:
            continue
        if use.kind == "bitcast":
            read += _bytes_read(inside, use.name, size)
        elif use.kind in ("slice", "dynamic-slice"):
            read += use.size()
        elif use.kind != "dynamic-update-slice" or name in operands[1:]:
            read += size
    return min(read, size)


def _bytes_written(inside: Computation, caller: Computation, x: Instruction) -> int:
    operands = [inside.get(name) or caller[name] for name in x.reads()]
    if x.kind in ("tuple", "bitcast"):
        return sum(_bytes_written(inside, caller, y) for y in operands)
    if x.kind == "dynamic-update-slice":
        return operands[1].size()
    if x.kind == "copy-start":  # its shape is a tuple of the copy, the original and a context
        return operands[0].size()
    return x.size()


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

    def instructions(self) -> list[tuple[int, str]]:
        """Lines of PTX and the machine code from them, without the jump to itself at its end."""
        command = [tool("nvdisasm"), "-gp", str(self.cubin)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        line, code = 0, []
        for place, text in re.findall(LISTED, listing[listing.index("\t.section\t.text.") :], re.M):
            line = int(place or line)
            if text:
                code.append((line, text))
        while code[-1][1] == "NOP":
            code.pop()
        return code[:-1] if re.match(r"BRA\b", code[-1][1]) else code


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


def run_alone(f, *args) -> None:
    """Runs f(*args) in its own process: Mosaic GPU compiles for one kind of GPU in each."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        pool.submit(f, *args).result()


def read_kernel(path: pathlib.Path) -> Kernel:
    """Assembles one PTX file."""
    ptx, cubin = path.read_text(), path.with_suffix(".cubin")
    target = re.search(r"\.target (\w+)", ptx)[1]
    command = [tool("ptxas"), f"-arch={target}", "-v", "-lineinfo", str(path), "-o", str(cubin)]
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
