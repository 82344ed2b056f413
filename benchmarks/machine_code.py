"""What the kernels' machine code costs: instructions issued, and bytes moved at least.

    python -m benchmarks machine_code --out benchmarks/results/machine_code.json

Compiles layers of ViT, Swin and NAT, and rotations of small and large arrays, for GPUs that need
not be there; this needs jax[cuda13], the wheel nvidia-cuda-nvdisasm, JAX_PLATFORMS=cpu and
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1. No time is measured. Each of a multiprocessor's four schedulers
issues at most one instruction of a warp in a cycle, so that issuing all that are written, and those
of the loop in each of its rounds, takes

    issue_us = warps * instructions of a warp / (multiprocessors * 4 * clock)

Branches that a warp does not take are counted, too, so that this is a bound from below only of a
kernel that takes all of them; stalls are not counted, and kernels usually take longer. The second
figure is the time of copying what a kernel must read and write (q, k, v, output, and backward their
gradients; of a rotation half of the channels, and the angles), at an assumed share of the memory
bandwidth.

The backward pass includes the gradients of the frequencies and of a bias.
"""

import dataclasses
import functools
import importlib.util
import math
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from unittest import mock

import jax

from benchmarks import rotary
from benchmarks._gpus import A100, H200, L4, absent_gpus, data_sheet
from benchmarks._program import compile_ahead
from benchmarks._runner import Keep, Result, record
from rope_jax.text import markdown_table
from rope_jax_kernels import Global, Neighborhood, Rotation, attention_qkv
from rope_jax_kernels.attention import triton
from rope_jax_kernels.model_shapes import LAYERS, Layer
from rope_jax_kernels.rotary import tile_sizes

KINDS = (H200, A100, L4)
SCHEDULERS = 4  # of a multiprocessor
COPIED = (
    4.3 / 4.8
)  # of the memory bandwidth of the data sheet: an assumption of what a copy reaches
TWO_OVER_PI = "0.636619"  # how each sine or cosine begins: the quarter turns of its angle
# Name -> layer of `model_shapes`, batch, and whether there is a bias.
CASES = {
    "ViT, 6 heads of 64": ("vit_s_class_token", 256, False),
    "ViT, 12 heads of 32": ("vit_s_12_heads", 256, False),
    "Swin, stage 1": ("swin_t_1", 128, False),
    "Swin, stage 1, bias": ("swin_t_1", 128, True),
    "NAT, stage 1": ("nat_mini_1", 64, False),
    "NAT, stage 1, bias": ("nat_mini_1", 64, True),
}
# The corners of the thesis' sizes (table A.1), in bfloat16 with angles in float32.
ROTATIONS = {
    f"rotation, {heads} x {side} x {side} rows of {channels}": rotary.Case(
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
        instructions, loop, rounds: all that are written, those of the longest loop, and how often
            a warp runs through that.
        blocks, warps: of the launch, and of a block.
        sines: sines and cosines that are computed in the whole kernel.
    """

    kernel: str
    registers: int
    spilled: int
    shared: int
    instructions: int
    loop: int
    rounds: int
    blocks: int
    warps: int
    sines: int

    @property
    def issued(self) -> int:
        """Instructions that a warp issues if it takes all branches."""
        return self.instructions + (self.rounds - 1) * self.loop

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


def layer_and_batch(name: str) -> tuple[Layer, int]:
    """A case's layer and batch."""
    layer, batch, bias = CASES[name]
    return dataclasses.replace(LAYERS[layer], bias=bias), batch


def train(layer: Layer, qkv: Any, coords: Any, freqs: Any, bias: Any, cotangent: Any) -> tuple:
    """The output of a layer, and the gradients of qkv, freqs and any bias."""

    def attend(qkv: jax.Array, freqs: jax.Array, bias: jax.Array) -> jax.Array:
        terms = {"rotation": Rotation(coords, freqs), "bias": bias if layer.bias else None}
        return attention_qkv(qkv, pattern=layer.pattern, implementation="triton", **terms)

    out, pull_back = jax.vjp(attend, qkv, freqs, bias)
    return out, pull_back(cotangent)


def pairs_of(layer: Layer) -> int:
    """Pairs of query and key of one head of one example that the pattern allows."""
    if isinstance(layer.pattern, Global):
        return layer.tokens**2
    if isinstance(layer.pattern, Neighborhood):
        return layer.tokens * math.prod(layer.pattern.size)
    return layer.tokens * math.prod(layer.pattern.fit(layer.places).size)


def tool_path(name: str) -> str | None:
    """The path of ptxas or nvdisasm, of the nvidia wheels or on PATH; None if there is neither."""
    found = importlib.util.find_spec("nvidia")
    for root in found.submodule_search_locations if found else ():
        for path in pathlib.Path(root).glob(f"*/bin/{name}"):
            return str(path)
    return shutil.which(name)


def tool(name: str) -> str:
    """The path of ptxas or nvdisasm.

    Raises:
        RuntimeError: it is not there.
    """
    if (path := tool_path(name)) is None:
        wheel = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}[name]
        raise RuntimeError(f"{name} is neither on PATH nor in a wheel: install {wheel}")
    return path


def machine_code(ptx: pathlib.Path) -> tuple[str, str]:
    """The report of ptxas on a PTX file for its target, and the listing of nvdisasm."""
    cubin = str(ptx.with_suffix(".cubin"))
    target = re.search(r"\.target (\w+)", ptx.read_text())[1]
    command = [tool("ptxas"), f"-arch={target}", "-v", str(ptx), "-o", cubin]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    command = [tool("nvdisasm"), cubin]
    return report, subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions_of(listing: str) -> tuple[list[str], int]:
    """The instructions of a listing, and how many are in the longest loop (0 without one).

    A jump to itself and the NOPs behind it, which fill the code up after its end, are left out.
    """
    labels, instructions, longest, ended = {}, [], 0, False
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            target = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            first = labels.get(target[1]) if target else None
            ended = first == len(instructions) or (ended and instruction[1].strip() == "NOP")
            if ended:
                continue
            instructions.append(instruction[1])
            if first is not None:
                longest = max(longest, len(instructions) - first)
    return instructions, longest


def kernels_of(layer: Layer, batch: int, kind: str = H200) -> list[Code]:
    """Compiles both passes of a layer in bfloat16: the forward kernel, then the backward ones."""
    rounds = {}  # name of a kernel -> of its loop: over blocks, or over the examples of a group
    launched = triton.run

    def run(kernel: Any, launch: Any, *rest: Any, **options: Any) -> list[jax.Array]:
        terms = kernel.keywords
        each = -(-terms["items"] // terms["groups"]) if "items" in terms else launch.tiles.blocks
        rounds[f"attention_{kernel.func.__name__}"] = each
        return launched(kernel, launch, *rest, **options)

    with mock.patch.object(triton, "run", run):
        return dumped(
            functools.partial(train, layer), list(layer.shapes(batch).values()), kind, rounds
        )


def rotation_kernel(case: rotary.Case, kind: str = H200) -> Code:
    """Compiles a rotation in place."""
    shapes = jax.eval_shape(lambda: rotary.operands(case, "triton", 1))
    (x,), (theta,) = shapes[0], shapes[1:]
    batch, _, rows, channels = x.shape
    tile = tile_sizes.spread_tile_of(batch, rows, channels // 4, channels, x.dtype.itemsize, "half")
    (code,) = dumped(rotary.step_of(case, "triton"), [x, theta], kind, {"rotary": tile.steps})
    return code


def dumped(f: Callable, shapes: Sequence[Any], kind: str, rounds: Mapping[str, int]) -> list[Code]:
    """The kernels of a program that is compiled for a kind of GPU; see `read_dump`."""
    with tempfile.TemporaryDirectory() as folder:

        @functools.wraps(f)
        def dumping(*args: Any) -> Any:
            return f(*args)

        # A program of another name: XLA dumps nothing of one that jax's cache has.
        dumping.__name__ = pathlib.Path(folder).name
        options = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
        compile_ahead(dumping, shapes, absent_gpus(kind=kind)[0], donate=(0,), options=options)
        return read_dump(pathlib.Path(folder), rounds)


def read_dump(folder: pathlib.Path, rounds: Mapping[str, int]) -> list[Code]:
    """The kernels of a program that XLA has dumped as PTX, in the order of launches.

    Args:
        folder: of the dump.
        rounds: of the loop of each kernel, by its name; others are left out.
    """
    (thunks,) = folder.glob("*thunk_sequence.txt")
    launches = re.findall(
        rf"\] ({'|'.join(rounds)}) grid: \[(.*?)\] threads: \[(.*?)\]\s+shared_memory: (\d+)",
        thunks.read_text(),
    )
    listed = {}
    for ptx in folder.glob("*.ptx"):
        for name in re.findall(r"\.entry (\w+)", ptx.read_text()):
            if name in rounds:
                listed[name] = machine_code(ptx)
    codes = []
    for name, grid, threads, shared in launches:
        report, listing = listed[name]
        instructions, loop = instructions_of(listing)
        blocks, count = (math.prod(map(int, x.split(","))) for x in (grid, threads))
        codes.append(
            Code(
                kernel=name,
                registers=int(re.findall(r"Used (\d+) registers", report)[-1]),
                spilled=sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report))),
                shared=int(shared),
                instructions=len(instructions),
                loop=loop,
                rounds=rounds[name] if loop else 1,
                blocks=blocks,
                warps=-(-count // 32),
                sines=sum(TWO_OVER_PI in instruction for instruction in instructions),
            )
        )
    return codes


def rows_of(
    name: str, codes: Sequence[Code], layer: Layer, batch: int, kind: str = H200
) -> list[dict[str, Any]]:
    """A row for each pass of a layer, with all its kernels."""
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
    header += ["instructions (loop x rounds)", "registers", "spilled, bytes", "resident warps"]
    rows = []
    for row in result["rows"]:
        cells = [row["gpu"].split("-")[0].split()[-1], f"{row['case']}, batch {row['batch']}"]
        cells += [row.get("direction", ""), *(_short(row[key]) for key in ("issue_us", "copy_us"))]
        per_logit = row.get("instructions_per_logit")
        cells.append("" if per_logit is None else f"{per_logit:.1f}")
        for code in row["kernels"]:
            loop = f"({code['loop']} x {code['rounds']})" if code["loop"] else ""
            name = code["kernel"].removeprefix("attention_").removesuffix("_kernel")
            counts = [code["registers"], code["spilled"], code["resident_warps"]]
            rows.append([*cells, name, f"{code['instructions']} {loop}", *map(str, counts)])
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
        for name in CASES:
            layer, batch = layer_and_batch(name)
            rows += rows_of(name, kernels_of(layer, batch, kind), layer, batch, kind)
            keep(settings={}, machine=machine, rows=rows)
        for name, case in ROTATIONS.items():
            rows.append(
                _row(kind, name, case.batch, [rotation_kernel(case, kind)], case.moved_bytes)
            )
            keep(settings={}, machine=machine, rows=rows)
    print(table({"rows": rows}))
