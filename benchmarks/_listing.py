"""Machine code of compiled kernels: the tools that print it, and its instructions and loops."""

import dataclasses
import importlib.util
import pathlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple


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


def disassembled(ptx: pathlib.Path) -> tuple[str, str]:
    """The report of ptxas on a PTX file for its target, and the listing of nvdisasm.

    Args:
        ptx: the file; the machine code is written beside it, as .cubin.

    Raises:
        RuntimeError: ptxas or nvdisasm is not there.
    """
    cubin = str(ptx.with_suffix(".cubin"))
    target = re.search(r"\.target (\w+)", ptx.read_text())[1]
    command = [tool("ptxas"), f"-arch={target}", "-v", str(ptx), "-o", cubin]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    command = [tool("nvdisasm"), cubin]
    return report, subprocess.run(command, capture_output=True, text=True, check=True).stdout


Span = tuple[int, int]  # the first instruction, and the last one


class Shared(NamedTuple):
    """The longest branch in a loop and outside the next one, taken by one of several warps.

    Attributes:
        loop: its number, the longest being 0.
        warps: that take turns.
    """

    loop: int
    warps: int


@dataclasses.dataclass(frozen=True)
class Listing:
    """What nvdisasm lists of a kernel.

    Attributes:
        instructions: without the jump to itself and the NOPs that fill the code up after its end.
        loops: from their first instruction to the last jump back to it, the longest first; without
            those that wait for a barrier.
        skips: instructions that a jump forward passes over.
    """

    instructions: list[str]
    loops: list[Span]
    skips: list[Span]

    def issued(
        self,
        rounds: Sequence[float],
        depths: Sequence[int] | None = None,
        unrolled: int = 0,
        shared: Shared | None = None,
    ) -> float:
        """Instructions that a warp issues.

        Args:
            rounds: of each loop, the longest first, each time that a warp comes to it.
            depths: the number of loops that each loop stands in; default: all those before it.
            unrolled: how many of the last loops the compiler may have unrolled.
            shared: a branch that warps take in turns.

        Raises:
            ValueError: the code has more loops, fewer, or other depths.
        """
        depths = list(range(len(rounds)) if depths is None else depths)
        found = [sum(holds(x, loop) for x in self.loops) - 1 for loop in self.loops]
        if not (found == depths[: len(found)] and len(found) >= len(rounds) - unrolled):
            lengths = ", ".join(str(length(loop)) for loop in self.loops)
            raise ValueError(
                f"the code has loops of {lengths or 'no'} instructions at the depths {found}, not "
                f"at {depths}: describe its loops as they are"
            )
        weights = [1.0] * len(self.instructions)

        def scale(span: Span, factor: float) -> None:
            for i in range(span[0], span[1] + 1):
                weights[i] *= factor

        for loop, count in zip(self.loops, rounds, strict=False):  # fewer loops: see above
            scale(loop, count)
        if shared is not None:
            outer, inner = self.loops[shared.loop : shared.loop + 2]
            branches = [x for x in self.skips if holds(outer, x) and not holds(x, inner)]
            scale(max(branches, key=length), 1 / shared.warps)
        return sum(weights)


def length(span: Span) -> int:
    """Instructions of a span."""
    return span[1] - span[0] + 1


def holds(outer: Span, inner: Span) -> bool:
    """Whether a span has all instructions of another one."""
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def read_listing(text: str) -> Listing:
    """Reads what nvdisasm prints of a kernel.

    What jumps back from behind the last EXIT is no loop: a wait for a barrier may stand there, or a
    path that is rarely taken. Nor is a wait before it, a short loop with SYNCS in it.
    """
    labels, instructions, jumps = {}, [], []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            if target := re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1]):
                jumps.append((len(instructions), target[1]))
            instructions.append(instruction[1].strip())
    pairs = [(i, labels[name]) for i, name in jumps if name in labels]
    ends = [i for i, target in pairs if i == target]
    if ends and set(instructions[ends[-1] + 1 :]) <= {"NOP"}:
        del instructions[ends[-1] :]
    exit = max(i for i, x in enumerate(instructions) if x.endswith("EXIT"))
    loops = {}
    for i, first in pairs:
        waits = i - first < 8 and "SYNCS" in " ".join(instructions[first:i])
        if first < i < exit and not waits:
            loops[first] = max(i, loops.get(first, i))
    skips = [(i + 1, target - 1) for i, target in pairs if target > i]
    return Listing(instructions, sorted(loops.items(), key=length, reverse=True), skips)
