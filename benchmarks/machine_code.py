"""What the kernels' machine code costs: instructions issued, and bytes moved at least.

    python -m benchmarks machine_code --out benchmarks/results/machine_code.json

Compiles layers of ViT, Swin and NAT, and rotations of small and large arrays, for GPUs that need
not be there; this needs jax[cuda13], the wheel nvidia-cuda-nvdisasm, JAX_PLATFORMS=cpu and
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1. No time is measured. Each of a multiprocessor's four schedulers
issues at most one instruction of a warp in a cycle, so that issuing all that are written, and those
of loops in each of their rounds, takes

    issue_us = warps * instructions of a warp / (multiprocessors * 4 * clock)

Branches that a warp does not take are counted, too, but for the gradients of queries in the
backward kernel of `mosaic`, which one warpgroup at a time computes. So this is a bound from below
only of a kernel that takes all of them; stalls are not counted, and kernels usually take longer.
The second figure is the time of copying what a kernel must read and write (q, k, v, output, and
backward their gradients; of a rotation half of the channels, and the angles), at an assumed share
of the memory bandwidth.

The backward pass includes the gradients of the frequencies and of a bias.
"""

import dataclasses
import functools
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from unittest import mock

import jax

from benchmarks import _rotations
from benchmarks._gpus import A100, H200, L4, absent_gpus, data_sheet
from benchmarks._listing import Shared, disassembled, length, read_listing
from benchmarks._program import compile_ahead
from benchmarks._runner import Keep, Result, record
from rope_jax.text import markdown_table
from rope_jax_kernels import Global, Neighborhood, Rotation, attention_qkv
from rope_jax_kernels.attention import mosaic_backward, mosaic_kernel, mosaic_launch, triton
from rope_jax_kernels.model_shapes import LAYERS, Layer
from rope_jax_kernels.rotary import tile_sizes

KINDS = (H200, A100, L4)
SCHEDULERS = 4  # of a multiprocessor
COPIED = (
    4.3 / 4.8
)  # of the memory bandwidth of the data sheet: an assumption of what a copy reaches
TWO_OVER_PI = "0.636619"  # how each sine or cosine begins: the quarter turns of its angle


class Case(NamedTuple):
    """A layer of `model_shapes` to compile, and the kinds of GPU that its implementation serves."""

    layer: Layer
    batch: int
    implementation: str = "triton"
    kinds: tuple[str, ...] = KINDS


_FEW_HEADS, _MANY_HEADS = LAYERS["vit_s_class_token"], LAYERS["vit_s_12_heads"]
_SWIN, _NAT = LAYERS["swin_t_1"], LAYERS["nat_mini_1"]
CASES = {
    "ViT, 6 heads of 64": Case(_FEW_HEADS, 256),
    "ViT, 6 heads of 64, mosaic": Case(_FEW_HEADS, 256, "mosaic", (H200,)),
    "ViT, 12 heads of 32": Case(_MANY_HEADS, 256),
    "ViT, 12 heads of 32, mosaic": Case(_MANY_HEADS, 256, "mosaic", (H200,)),
    "Swin, stage 1": Case(dataclasses.replace(_SWIN, bias=False), 128),
    "Swin, stage 1, bias": Case(dataclasses.replace(_SWIN, bias=True), 128),
    "NAT, stage 1": Case(dataclasses.replace(_NAT, bias=False), 64),
    "NAT, stage 1, bias": Case(dataclasses.replace(_NAT, bias=True), 64),
}
# The corners of the thesis' sizes (table A.1), in bfloat16 with angles in float32.
ROTATIONS = {
    f"rotation, {heads} x {side} x {side} rows of {channels}": _rotations.Problem(
        batch, heads, side, channels, "16-32", direction="forward"
    )
    for batch, heads, side, channels in (
        (1, 1, 7, 32),
        (1, 8, 7, 128),
        (16, 6, 14, 64),
        (128, 8, 56, 128),
    )
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What bounds kernels on a GPU.

    Attributes:
        multiprocessors: their number.
        cycles: of their clock in a microsecond.
        copy_bytes: bytes that a copy reads and writes in a microsecond, as assumed.
        registers, shared, warps: registers, bytes of shared memory and most warps of one
            multiprocessor.
    """

    multiprocessors: int
    cycles: float
    copy_bytes: float
    registers: int
    shared: int
    warps: int


@functools.cache
def gpu_of(kind: str) -> Gpu:
    """The bounds of a kind of GPU."""
    sheet = functools.partial(data_sheet, kind)
    return Gpu(
        multiprocessors=int(sheet("core_count")),
        cycles=1e3 * sheet("clock_rate_ghz"),
        copy_bytes=COPIED * sheet("memory_bandwidth") / 1e6,
        registers=int(sheet("registers_per_core_limit")),
        shared=int(sheet("shared_memory_per_block_optin")),
        warps=int(sheet("threads_per_core_limit")) // 32,
    )


@dataclasses.dataclass(frozen=True)
class Code:
    """A kernel as machine code.

    Attributes:
        kernel: its name.
        registers, spilled, shared: registers of a thread, bytes spilled by one, bytes of shared
            memory of a block.
        instructions: all that are written.
        loops: of the longest loops, instructions and how often a warp runs through them each time
            it comes to them, on average.
        issued: instructions that a warp issues.
        blocks, warps: of the launch, and of a block.
        sines: sines and cosines that are computed in the whole kernel.
    """

    kernel: str
    registers: int
    spilled: int
    shared: int
    instructions: int
    loops: tuple[tuple[int, float], ...]
    issued: float
    blocks: int
    warps: int
    sines: int

    def resident(self, gpu: Gpu) -> int:
        """Blocks that a multiprocessor holds at a time."""
        by_registers = gpu.registers // (self.registers * self.warps * 32)
        return min(by_registers, gpu.shared // max(1, self.shared), gpu.warps // self.warps)

    def issue_us(self, gpu: Gpu) -> float:
        """Microseconds that issuing these instructions takes at least.

        A launch of fewer blocks than the GPU holds leaves schedulers idle, which only adds to it.
        """
        total = self.blocks * self.warps * self.issued
        return total / (gpu.multiprocessors * SCHEDULERS * gpu.cycles)


def train(case: Case, qkv: Any, coords: Any, freqs: Any, bias: Any, cotangent: Any) -> tuple:
    """The output of a layer, and the gradients of qkv, freqs and any bias."""
    options = {"pattern": case.layer.pattern, "implementation": case.implementation}

    def attend(qkv: jax.Array, freqs: jax.Array, bias: jax.Array) -> jax.Array:
        terms = {"rotation": Rotation(coords, freqs), "bias": bias if case.layer.bias else None}
        return attention_qkv(qkv, **options, **terms)

    out, pull_back = jax.vjp(attend, qkv, freqs, bias)
    return out, pull_back(cotangent)


def pairs_of(layer: Layer) -> int:
    """Pairs of query and key of one head of one example that the pattern allows."""
    if isinstance(layer.pattern, Global):
        return layer.tokens**2
    if isinstance(layer.pattern, Neighborhood):
        return layer.tokens * math.prod(layer.pattern.size)
    return layer.tokens * math.prod(layer.pattern.fit(layer.places).size)


@dataclasses.dataclass
class Launch:
    """What is known of a kernel before it is compiled.

    Attributes:
        rounds: of its loops, as in `Listing.issued`; of loops over examples, those of a program on
            average, where some programs have fewer.
        depths, unrolled, shared: as in `Listing.issued`.
        blocks, warps: of the launch, and of a block, where XLA does not list them.
    """

    rounds: Sequence[float]
    depths: Sequence[int] | None = None
    unrolled: int = 0
    shared: Shared | None = None
    blocks: int = 0
    warps: int = 0


def kernels_of(case: Case, kind: str = H200) -> list[Code]:
    """Compiles both passes of a layer in bfloat16: the forward kernel, then the backward ones."""
    launches: dict[str, Launch] = {}
    run, program_grid = triton.run, mosaic_launch.program_grid

    def of_triton(kernel: Any, launch: Any, *rest: Any, **options: Any) -> list[jax.Array]:
        """Loops over the examples of a program, and inside over blocks; none of a single round."""
        terms, rounds = kernel.keywords, [average(case.batch, launch.each), launch.tiles.blocks]
        if "items" in terms:  # every program of the bias has as many rounds
            rounds = [-(-terms["items"] // terms["groups"])]
        launches[f"attention_{kernel.func.__name__}"] = Launch([x for x in rounds if x > 1])
        return run(kernel, launch, *rest, **options)

    def of_mosaic(
        task: Any, kernel: Any, name: str, outputs: Any, scratch: Any, programs: int, groups: int
    ) -> Callable:
        """Loops over examples, and inside over blocks of keys, or see `mosaic_backward`."""
        plan = kernel.keywords["plan"]
        launch = Launch([average(case.batch, plan.items), plan.blocks])
        if name == "attention_mosaic_backward":
            halves = mosaic_kernel.ROWS // mosaic_backward.WIDTH
            launch.rounds = [*launch.rounds, halves, plan.blocks]
            launch.depths, launch.unrolled = (0, 1, 2, 2), 1
            launch.shared = Shared(loop=1, warps=groups)
        launch.blocks, launch.warps = programs, 4 * groups
        launches[name] = launch
        return program_grid(task, kernel, name, outputs, scratch, programs, groups)

    with (
        mock.patch.object(triton, "run", of_triton),
        mock.patch.object(mosaic_launch, "program_grid", of_mosaic),
    ):
        shapes = list(case.layer.shapes(case.batch).values())
        return dumped(functools.partial(train, case), shapes, kind, launches)


def average(batch: int, each: int) -> float:
    """Examples of a program, on average, where none has more than `each`."""
    return batch / -(-batch // each)


def rotation_kernel(case: _rotations.Problem, kind: str = H200) -> Code:
    """Compiles a rotation in place."""
    shapes = jax.eval_shape(lambda: _rotations.operands(case, "triton", 1))
    (x,), (theta,) = shapes[0], shapes[1:]
    batch, _, rows, channels = x.shape
    tile = tile_sizes.spread_tile_of(batch, rows, channels // 4, channels, x.dtype.itemsize, "half")
    launches = {"rotary": Launch([tile.steps] if tile.steps > 1 else [])}
    (code,) = dumped(_rotations.step_of(case, "triton"), [x, theta], kind, launches)
    return code


def dumped(
    f: Callable, shapes: Sequence[Any], kind: str, launches: Mapping[str, Launch]
) -> list[Code]:
    """The kernels of a program that is compiled for a kind of GPU; see `read_dump`."""
    with tempfile.TemporaryDirectory() as folder:

        @functools.wraps(f)
        def dumping(*args: Any) -> Any:
            return f(*args)

        # A program of another name: XLA dumps nothing of one that jax's cache has.
        dumping.__name__ = pathlib.Path(folder).name
        options = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
        with mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=folder):
            compile_ahead(dumping, shapes, absent_gpus(kind=kind)[0], donate=(0,), options=options)
        return read_dump(pathlib.Path(folder), launches)


def read_dump(folder: pathlib.Path, launches: Mapping[str, Launch]) -> list[Code]:
    """The kernels of a program that XLA and Mosaic GPU have dumped as PTX, in their order.

    Args:
        folder: of the dump.
        launches: by a kernel's name; others are left out.
    """
    (thunks,) = folder.glob("*thunk_sequence.txt")
    listed = re.findall(
        rf"\] ({'|'.join(launches)}) grid: \[(.*?)\] threads: \[(.*?)\]\s+shared_memory: (\d+)",
        thunks.read_text(),
    )
    entries = {
        name: ptx
        for ptx in folder.glob("*.ptx")
        for name in re.findall(r"\.entry (\w+)", ptx.read_text())
    }
    codes = []
    for name, launch in launches.items():  # those of Mosaic GPU, which XLA does not list
        if ptx := entries.get(f"{name}_mosaic_gpu_kernel"):
            resources = ptx.with_suffix(".resources.txt").read_text()
            shared = int(re.search(r"smem_scratch_bytes=(\d+)", resources)[1])
            codes.append(read_code(name, ptx, launch, shared, launch.blocks, launch.warps))
    for name, grid, threads, shared in listed:
        blocks, count = (math.prod(map(int, x.split(","))) for x in (grid, threads))
        codes.append(
            read_code(name, entries[name], launches[name], int(shared), blocks, -(-count // 32))
        )
    return codes


def read_code(
    name: str, ptx: pathlib.Path, launch: Launch, shared: int, blocks: int, warps: int
) -> Code:
    """A kernel's machine code, from its PTX."""
    report, text = disassembled(ptx)
    listing = read_listing(text)
    return Code(
        kernel=name,
        registers=int(re.findall(r"Used (\d+) registers", report)[-1]),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report))),
        shared=shared,
        instructions=len(listing.instructions),
        loops=tuple(zip(map(length, listing.loops), launch.rounds, strict=False)),
        issued=listing.issued(launch.rounds, launch.depths, launch.unrolled, launch.shared),
        blocks=blocks,
        warps=warps,
        sines=sum(TWO_OVER_PI in instruction for instruction in listing.instructions),
    )


def rows_of(name: str, codes: Sequence[Code], case: Case, kind: str = H200) -> list[dict[str, Any]]:
    """A row for each pass of a layer, with all its kernels."""
    layer, batch = case.layer, case.batch
    moved = 2 * batch * layer.tokens * layer.heads * layer.head_dim  # q, in bfloat16
    logits = batch * layer.heads * pairs_of(layer)
    rows = []
    for direction, of_pass, arrays in (("forward", codes[:1], 4), ("backward", codes[1:], 8)):
        issued = sum(32 * code.blocks * code.warps * code.issued for code in of_pass)
        row = _row(kind, name, batch, of_pass, arrays * moved)
        rows.append(row | {"direction": direction, "instructions_per_logit": issued / logits})
    return rows


def _row(kind: str, name: str, batch: int, codes: Sequence[Code], moved: int) -> dict[str, Any]:
    gpu = gpu_of(kind)
    return {
        "gpu": kind,
        "case": name,
        "batch": batch,
        "issue_us": sum(code.issue_us(gpu) for code in codes),
        "copy_us": moved / gpu.copy_bytes,
        "kernels": [
            dataclasses.asdict(code) | {"resident_warps": code.resident(gpu) * code.warps}
            for code in codes
        ],
    }


def table(result: Result) -> str:
    """The rows of a result."""
    header = ["GPU", "layer", "pass", "issue, us", "copy, us", "instructions a logit", "kernel"]
    header += ["instructions (loops x rounds)", "registers", "spilled, bytes", "resident warps"]
    rows = []
    for row in result["rows"]:
        cells = [row["gpu"].split("-")[0].split()[-1], f"{row['case']}, batch {row['batch']}"]
        cells += [row.get("direction", ""), *(_short(row[key]) for key in ("issue_us", "copy_us"))]
        per_logit = row.get("instructions_per_logit")
        cells.append("" if per_logit is None else f"{per_logit:.1f}")
        for code in row["kernels"]:
            loops = ", ".join(f"{size} x {rounds:.3g}" for size, rounds in code["loops"])
            loops = f" ({loops})" if loops else ""
            name = code["kernel"].removeprefix("attention_").removesuffix("_kernel")
            counts = [code["registers"], code["spilled"], code["resident_warps"]]
            rows.append([*cells, name, f"{code['instructions']}{loops}", *map(str, counts)])
            cells = [""] * len(cells)
    return markdown_table(header, rows)


def _short(microseconds: float) -> str:
    return f"{microseconds:.0f}" if microseconds >= 10 else f"{microseconds:.2g}"


def run(keep: Keep, *, gpus: list[Literal[*KINDS]] = KINDS) -> None:
    """Compiles; keeps the figures after every case.

    Args:
        keep: writes the result.
        gpus: to compile for
    """
    machine = record("machine_code", {})["machine"] | {"device": "compiled for absent GPUs"}
    rows: list[dict[str, Any]] = []
    for kind in gpus:
        for name, case in CASES.items():
            if kind in case.kinds:
                rows += rows_of(name, kernels_of(case, kind), case, kind)
            keep(settings={}, machine=machine, rows=rows)
        for name, case in ROTATIONS.items():
            rows.append(
                _row(kind, name, case.batch, [rotation_kernel(case, kind)], case.moved_bytes)
            )
            keep(settings={}, machine=machine, rows=rows)
    print(table({"rows": rows}))
