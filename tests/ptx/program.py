"""A kernel as steps of a machine: the table of instructions, and their operands.

A step is a function of the machine and of the lanes that take part, as a mask or None for all. It
is made once for each instruction, by the function that `instruction` registers for its name.
"""

import dataclasses
import enum
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.parse import Instruction, Kernel, elements, registers

TYPES = {
    "pred": np.bool_,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": np.uint16,  # NumPy has none
    "bf16x2": np.uint32,
    "f16x2": np.uint32,
    "f32x2": np.uint64,
} | {
    f"{sign}{bits}": np.dtype(f"{'i' if sign == 's' else 'u'}{bits // 8}").type
    for sign in "bus"
    for bits in (8, 16, 32, 64)
}
_FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]{8,16})$")
_INTEGER = re.compile(r"-?(?:0x[0-9a-fA-F]+|\d+)U?$")
_ADDRESS = re.compile(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+))?\s*\]")

TABLE: dict[str, Callable] = {}


class Kind(enum.Enum):
    """How the machine goes on after a step."""

    PLAIN = enum.auto()  # at the next instruction
    BRANCH = enum.auto()  # at another one
    EXIT = enum.auto()
    BARRIER = enum.auto()  # when enough threads are there
    WAIT = enum.auto()  # at the next one, once an mbarrier has turned


@dataclasses.dataclass
class Step:
    """An instruction that can be run.

    Attributes:
        kind: how the machine goes on.
        run: a function, or the index that a branch leads to.
        guard: the predicate and whether it is negated, or None.
        where: the instruction in reports.
        touches: registers of wgmma that it writes and that it reads, or None.
        is_move: whether it moves one register to another.
    """

    kind: Kind
    run: Any
    guard: tuple[str, bool] | None
    where: str
    touches: tuple[set[str], set[str]] | None = None
    is_move: bool = False


def instruction(*names: str, kind: Kind = Kind.PLAIN):
    """Registers a function of (instruction, program) that makes steps of all `names[.suffix]`."""

    def register(make):
        TABLE.update(dict.fromkeys(names, (kind, make)))
        return make

    return register


def executes(*names: str, kind: Kind = Kind.PLAIN, **operands: Callable):
    """Registers a function of (machine, lanes, x, *operands) that executes all `names[.suffix]`.

    `operands` are functions of (x, program), as below, that are called once for an instruction x.
    """

    def register(run):
        def make(x, program):
            return functools.partial(run, x=x, **{y: f(x, program) for y, f in operands.items()})

        return instruction(*names, kind=kind)(make) or run

    return register


def address(i: int) -> Callable:
    return lambda x, program: program.address(x.operands[i])


def write(i: int) -> Callable:
    return lambda x, program: program.write(x.operands[i])


def write_all(i: int) -> Callable:
    """Writers of the registers of a vector, or of a pair as d|p."""
    return lambda x, program: [program.write(y) for y in elements(x.operands[i])]


def read(i: int, kind: str | None = None) -> Callable:
    return lambda x, program: program.read(x.operands[i], kind or x.kind)


def read_all(i: int, kind: str) -> Callable:
    return lambda x, program: [program.read(y, kind) for y in elements(x.operands[i])]


def number(i: int, default: str = "0") -> Callable:
    return lambda x, program: int(x.operands[i] if len(x.operands) > i else default, 0)


def bits(kind: str) -> int:
    """Bits of a type.

    >>> bits("bf16x2"), bits("pred")
    (32, 1)
    """
    return 1 if kind == "pred" else 8 * np.dtype(TYPES[kind]).itemsize


class Program:
    """The steps of a kernel."""

    def __init__(self, text: str):
        self.kernel = Kernel(text)
        self._names = [name for name, _ in self.kernel.params]
        touched = [registers(x) for x in self.kernel.code]
        # Mosaic GPU loads what a store replaces; ptxas drops loads whose result nobody reads.
        self.read_anywhere = {name for _, read in touched for name in read}
        # And it selects between zeros and what is read before the first value is written.
        chosen = [x.parts[0] == "selp" for x in self.kernel.code]
        others = [read for (_, read), x in zip(touched, chosen, strict=True) if not x]
        self.used = set().union(*others)
        products = [x for x in self.kernel.code if x.name.startswith("wgmma.mma_async")]
        self.of_products = {y for x in products for y in registers(x)[0] | sources_of(x)}
        moves = [
            names for x, names in zip(self.kernel.code, touched, strict=True) if is_move(x, self)
        ]
        # A register that is moved to one of a product stands for it.
        while more := {
            name
            for to, source in moves
            if to & self.of_products
            for name in source - self.of_products
        }:
            self.of_products |= more
        self.steps = [
            self._step(x, *names) for x, names in zip(self.kernel.code, touched, strict=True)
        ]

    def _step(self, x, written, read):
        if x.parts[0] == "bra":
            kind, run = Kind.BRANCH, self.kernel.labels[x.operands[0]]
        else:
            prefixes = (".".join(x.parts[:n]) for n in range(len(x.parts), 0, -1))
            name = next((p for p in prefixes if p in TABLE), None)
            if name is None:
                raise NotImplementedError(f"{self.kernel.name}, {x}")
            kind, make = TABLE[name]
            run = make(x, self)
        touches = written & self.of_products, read & self.of_products
        if x.name.startswith("wgmma") or not any(touches):
            touches = None
        return Step(kind, run, x.guard, f"line {x.line} ({x.name})", touches, is_move(x, self))

    def read(self, operand: str, kind: str) -> Callable:
        """A function of the machine that returns an operand of all lanes, or a constant."""
        dtype = np.dtype(TYPES[kind])
        if operand.startswith("!") or operand.startswith("-%"):
            inner = self.read(operand[1:], kind)
            return (lambda m: ~inner(m)) if operand[0] == "!" else (lambda m: -inner(m))
        if width := self.kernel.widths.get(operand):
            if width == bits(kind) == 1:
                return lambda m: m.register(operand)
            if width == bits(kind):
                return lambda m: m.register(operand).view(dtype)
            narrow = np.dtype(f"u{dtype.itemsize}")
            return lambda m: m.register(operand).astype(narrow).view(dtype)
        if operand.startswith("%"):
            return lambda m: m.special[operand].astype(dtype)
        if operand in self._names:
            return lambda m: np.uint64(m.params[operand])
        value = self._constant(operand, kind)
        return lambda m: value

    def _constant(self, operand, kind):
        if kind == "pred":
            return np.bool_(int(operand))
        dtype = np.dtype(TYPES[kind])
        unsigned = np.dtype(f"u{dtype.itemsize}")
        if real := _FLOAT.match(operand):
            value = np.array(int(real[2], 16), "u8" if real[1] in "dD" else "u4")
            return value.view(dtype) if value.itemsize == dtype.itemsize else value.astype(dtype)
        if _INTEGER.match(operand):
            number = int(operand.rstrip("U"), 0)
        elif operand in self.kernel.symbols:
            number = self.kernel.symbols[operand]
        else:
            raise NotImplementedError(f"the operand {operand}")
        return np.array(number & ((1 << 8 * dtype.itemsize) - 1), unsigned).view(dtype)

    def write(self, operand: str) -> Callable:
        """A function (machine, lanes, values) that writes a register; wider ones get zeros."""
        if operand == "_":
            return lambda m, on, values: None
        width = self.kernel.widths[operand]
        stored = np.dtype(np.bool_ if width == 1 else f"u{width // 8}")

        def put(m, on, values):
            values = np.asarray(values)
            if values.dtype != stored:
                if values.dtype != np.bool_:
                    values = values.view(f"u{values.itemsize}")
                values = values.astype(stored, copy=False)
            register = m.register(operand)
            if on is None:
                register[...] = values
            else:
                np.copyto(register, values, where=on)

        return put

    def address(self, operand: str) -> Callable:
        """A function (machine, lanes) that returns the addresses of these lanes."""
        base, offset = _ADDRESS.match(operand).groups()
        read = self.read(base, f"u{self.kernel.widths.get(base, 64)}")
        offset = int(offset or "0", 0)

        def addresses(m, on):
            every = np.broadcast_to(read(m).astype(np.int64) + offset, m.lanes)
            return every if on is None else every[on]

        return addresses


def sources_of(product: Instruction) -> set[str]:
    """Registers of the first factor of wgmma.mma_async."""
    return set(re.findall(r"%\w+", product.operands[1])) if product.operands[1][0] == "{" else set()


def is_move(x: Instruction, program: Program) -> bool:
    """True for a move between registers: compilers put some between wgmma.fence and the product."""
    widths = program.kernel.widths
    return x.parts[0] == "mov" and x.guard is None and all(y in widths for y in x.operands)
