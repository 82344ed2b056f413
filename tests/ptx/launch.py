"""A compiled kernel, and its emulation on arrays."""

import dataclasses
import functools
import math

import numpy as np

from tests.ptx import (  # noqa: F401 (the table)
    arithmetic,
    matrices,
    movement,
    synchronization,
    tensor_memory,
)
from tests.ptx.machine import Machine, blocks_together
from tests.ptx.memory import GlobalMemory, Zeros
from tests.ptx.order import Findings
from tests.ptx.program import Program

THREADS_TOGETHER = 4096  # that run as one vector
SAMPLED = 2048  # threads of which issued instructions are counted
MAPS = 1 << 32  # address of the tensor maps


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An operand as the copy engine sees it: its tensor map, outermost dimension first.

    Attributes:
        operand: which it is.
        sizes, strides: of each dimension; strides in elements.
        box: sizes of the part that is copied.
        swizzle: bytes of a row whose units are exchanged in shared memory; 16 for none.
        base: address.
        itemsize: bytes of an element.
    """

    operand: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    base: int = 0
    itemsize: int = 0

    def elements(self, starts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Addresses of a box's elements in shared memory's order, and which are inside.

        Args:
            starts: of the box, innermost dimension first.
        """
        grid = np.indices(self.box)
        place = [x.ravel() + start for x, start in zip(grid, starts[::-1], strict=True)]
        inside = [(x >= 0) & (x < size) for x, size in zip(place, self.sizes, strict=True)]
        offset = sum(x * y for x, y in zip(place, self.strides, strict=True))
        return self.base + self.itemsize * offset, np.logical_and.reduce(inside)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A compiled kernel and how it is launched.

    Attributes:
        ptx: its text.
        grid: blocks along x, y and z.
        threads: of a block.
        shared: bytes of a block's shared memory.
        outputs: shape and dtype of each output, which follow the inputs as parameters.
        aliases: input -> output in the same memory.
        mutable: inputs that the kernel may write, whose values follow the outputs.
        tensors: tensor maps, which are one parameter after all pointers.
        pointers: the operands of the pointers; None for all without a tensor map.
    """

    ptx: str
    grid: tuple[int, ...]
    threads: int
    shared: int
    outputs: tuple
    aliases: dict[int, int] = dataclasses.field(default_factory=dict)
    mutable: tuple[int, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    pointers: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return read_program(self.ptx).kernel.name


read_program = functools.lru_cache(maxsize=64)(Program)


@dataclasses.dataclass
class Partial:
    """An array of which a part is not written yet; a mask of its shape tells which is."""

    value: np.ndarray
    written: np.ndarray


def emulate(launch: Launch, inputs: list, findings: Findings) -> list:
    """Runs a launch on arrays, some of which may be `Partial`.

    Returns its outputs, then mutable inputs as they are left; those that are not written everywhere
    as `Partial`.
    """
    arrays, operands = lay_out(launch, inputs)
    memory = GlobalMemory(arrays, launch.threads // 32, findings)
    for blocks in blocks_together(launch.threads, math.prod(launch.grid), THREADS_TOGETHER):
        prepare(launch, blocks, memory, operands, findings).run()
    results = [memory.contents(i) for i in (*operands[len(inputs) :], *launch.mutable)]
    return [value if written.all() else Partial(value, written) for value, written in results]


def count_issued(launch: Launch, inputs: list, sample: int | None = None) -> dict[int, float]:
    """Lines of the PTX -> how often one block issues them, by all its warps together.

    It is the mean of some blocks, evenly spaced, to which global memory reads as zeros.

    Args:
        launch: the kernel.
        inputs: shapes and dtypes.
        sample: number of blocks; None for those of `SAMPLED` threads.

    Raises:
        RuntimeError: the kernel has errors, so that it may not have run to its end.
    """
    sample = sample or max(1, SAMPLED // launch.threads)
    inputs = [np.zeros(x.shape, x.dtype) for x in inputs]
    arrays, operands = lay_out(launch, inputs)
    count = math.prod(launch.grid)
    blocks = sorted({int((i + 0.5) * count / sample) for i in range(sample)})
    findings = Findings()
    machine = prepare(launch, blocks, Zeros(arrays), operands, findings)
    machine.run()
    if findings:
        raise RuntimeError(f"{launch.name}: {findings}")
    code = machine.program.kernel.code
    return {x.line: n / len(blocks) for x, n in zip(code, machine.executed, strict=True)}


def lay_out(launch, inputs):
    """The arrays of a launch as of `GlobalMemory`, and which of them each operand is."""
    arrays = []
    for i, x in enumerate(inputs):
        value, written = (x.value, x.written) if isinstance(x, Partial) else (x, True)
        arrays.append((f"input {i}", np.ascontiguousarray(value), written))
    place = {output: i for i, output in launch.aliases.items()}
    for i, (shape, dtype) in enumerate(launch.outputs):
        if i not in place:
            place[i] = len(arrays)
            arrays.append((f"output {i}", np.empty(shape, dtype), False))
    return arrays, [*range(len(inputs)), *(place[i] for i in range(len(launch.outputs)))]


def prepare(launch, blocks, memory, operands, findings):
    """The machine that runs some blocks of a launch."""
    program = read_program(launch.ptx)
    shared = max(launch.shared, program.kernel.static_shared)
    params, tensors = bind(program, launch, memory, operands)
    return Machine(
        program, launch.grid, launch.threads, shared, blocks, memory, params, tensors, findings
    )


def bind(program, launch, memory, operands):
    """Values of the kernel's parameters, and tensor maps by address."""
    described = {x.operand for x in launch.tensors}
    pointers = launch.pointers
    if pointers is None:
        pointers = [i for i in range(len(operands)) if i not in described]
    pointers = iter([memory.address(operands[i]) for i in pointers])
    params, tensors = {}, {}
    for name, size in program.kernel.params:
        params[name] = MAPS if size > 8 else next(pointers)
    if next(pointers, None) is not None:
        raise ValueError(f"{program.kernel.name} has fewer parameters than operands")
    for i, x in enumerate(launch.tensors):
        base, (_, array, _) = (
            memory.address(operands[x.operand]),
            memory.arrays[operands[x.operand]],
        )
        tensors[MAPS + 128 * i] = dataclasses.replace(x, base=base, itemsize=array.dtype.itemsize)
    return params, tensors
