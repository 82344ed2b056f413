"""Machine code of compiled kernels: the tools that print it, and its instructions and loops."""

import dataclasses
import importlib.util
import pathlib
import re
import shutil
import subprocess
from collections.abc import Sequence


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


Span = tuple[int, int]  # the first instruction, and the last one


@dataclasses.dataclass(frozen=True)
class Listing:
    """What nvdisasm lists of a kernel.

    Attributes:
        instructions: without the jump to itself and the NOPs that fill the code up after its end.
        loops: from their first instruction to the jump back, the longest first; without those that
            wait for a barrier.
        skips: instructions that a jump forward passes over.
    """

    instructions: list[str]
    loops: list[Span]
    skips: list[Span]

    def issued(self, rounds: Sequence[float], shared: Sequence[int] = ()) -> float:
        """Instructions that a warp issues.

        Args:
            rounds: of the longest loops, each time that a warp comes to them.
            shared: (n, m): one of m warps takes the longest branch in the n-th of these loops and
                outside the next one.
        """
        weights = [1.0] * len(self.instructions)

        def scale(span: Span, factor: float) -> None:
            for i in range(span[0], span[1] + 1):
                weights[i] *= factor

        for loop, count in zip(self.loops, rounds, strict=False):
            scale(loop, count)
        if shared:
            number, count = shared
            outer, inner = self.loops[number : number + 2]
            branches = [x for x in self.skips if holds(outer, x) and not holds(x, inner)]
            scale(max(branches, key=length), 1 / count)
        return sum(weights)


def length(span: Span) -> int:
    """Instructions of a span."""
    return span[1] - span[0] + 1


def holds(outer: Span, inner: Span) -> bool:
    """Whether a span has all instructions of another one."""
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def read_listing(text: str) -> Listing:
    """Reads what nvdisasm prints.

    A wait for a barrier, whose loop has SYNCS in it, may stand behind the kernel's end; the jump
    that follows it goes back to where the wait began, and is no loop.
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
    back = [(target, i) for i, target in pairs if target < i]
    waits = [x for x in back if length(x) < 9 and "SYNCS" in " ".join(instructions[x[0] : x[1]])]
    ended = {last + 1 for _, last in waits}
    loops = [x for x in back if x not in waits and x[1] not in ended]
    skips = [(i + 1, target - 1) for i, target in pairs if target > i]
    return Listing(instructions, sorted(loops, key=length, reverse=True), skips)
