"""Launches and bytes of compiled GPU programs, read from their optimised HLO.

`operations` counts, of a program for one GPU:

- a launch for each fusion, custom call and other operation that does work; those in the body of a
  loop as often as the loop runs, and of a conditional the branch with the most bytes;
- the bytes of its operands and results, each once. Of an operand that a fusion only slices, the
  slices count, and of an array that it updates in place, the updated part.

It does not count a library's workspace and additional kernels (split sums of a matrix product, the
several kernels of an attention's backward pass), what a kernel reads repeatedly or leaves unread,
and the conditions of loops. What is read from the L2 cache counts like the rest.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

import jax

from benchmarks._program import sizes

TINY = 2 * 10**6  # bytes; a launch that moves less takes about as long as an empty one
KINDS = ("products", "attention", "norm", "elementwise", "reductions", "optimizer", "copies")
# Operations that take no time on a GPU.
FREE = {"parameter", "bitcast", "tuple", "get-tuple-element", "constant", "copy-done", "after-all"}
PRODUCTS = {"dot", "convolution"}
MOVING = {
    *("copy", "transpose", "reshape", "broadcast", "iota", "pad", "concatenate", "reverse"),
    *("slice", "dynamic-slice", "dynamic-update-slice", "copy-start", "gather"),
}
ELEMENTWISE = {
    *("add", "subtract", "multiply", "divide", "maximum", "minimum", "select", "compare"),
    *("convert", "negate", "sqrt", "rsqrt"),
}
INSTRUCTION = re.compile(r"\s+(ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\((.*?)\)(.*)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of HLO: name, type, operation, operands' names and what follows them."""

    name: str
    type: str
    operation: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    def attribute(self, pattern: str) -> str | None:
        """The group of a pattern in what follows the operands, or None."""
        found = re.search(pattern, self.rest)
        return found[1] if found else None


Body = Sequence[Instruction]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that takes time.

    Attributes:
        kind: its HLO name, or for a custom call its target.
        read: bytes of each operand that it reads; of a sliced operand, of the slices.
        written: bytes of each result.
        in_place: whether results alias operands.
        times: how often it runs.
        parts: the HLO names of what a fusion computes, or its own.
        scopes: where in the traced program it, and what a fusion computes, comes from.
    """

    kind: str
    read: tuple[int, ...]
    written: tuple[int, ...]
    in_place: bool
    times: int = 1
    parts: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    scopes: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)

    @property
    def bytes(self) -> int:
        """Bytes read and written, each time."""
        return sum(self.read) + sum(self.written)


def text_of(compiled: jax.stages.Compiled) -> str:
    """The optimised HLO; of the backends' settings it has only the trip counts of loops."""

    def trips(settings: re.Match) -> str:
        count = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', settings[0])
        return f"trip_count={count[1]}" if count else ""

    return re.sub(r"backend_config=.*", trips, compiled.as_text())


def computations(text: str) -> dict[str, list[Instruction]]:
    """Name (or ENTRY) -> the instructions of each computation."""
    found, lines = {}, []
    for line in text.splitlines():
        if start := re.match(r"(ENTRY )?%(\S+) \(.*\{$", line):
            lines = found["ENTRY" if start[1] else start[2]] = []
        elif match := INSTRUCTION.match(line):
            root, name, shape, operation, operands, rest = match.groups()
            if operation in ("parameter", "constant"):  # a number is no operand
                rest, operands = f"({operands}){rest}", ""
            names = tuple(re.findall(r"%([\w.-]+)", operands))
            lines.append(Instruction(name, shape, operation, names, rest, bool(root)))
    return found


def operations(text: str, computation: str = "ENTRY") -> list[Operation]:
    """The operations that take time, of a program's entry or of a computation inside it."""
    return list(_operations(computations(text), computation, 1))


def _operations(found: dict[str, Body], computation: str, times: int) -> Iterator[Operation]:
    types = {x.name: x.type for x in found[computation]}
    for x in found[computation]:
        if x.operation in FREE:
            continue
        if x.operation == "while":
            body, count = x.attribute(r"body=%([\w.-]+)"), x.attribute(r"trip_count=(\d+)")
            yield from _operations(found, body, times * int(count or 1))
        elif x.operation == "conditional":
            names = re.findall(r"%([\w.-]+)", x.attribute(r"((?:branch|true)_comp.*?), metadata"))
            branches = [list(_operations(found, name, times)) for name in names]
            yield from max(branches, key=lambda run: sum(y.times * y.bytes for y in run))
        elif x.operation == "call":
            yield from _operations(found, x.attribute(r"to_apply=%([\w.-]+)"), times)
        else:
            fused = x.attribute(r"calls=%([\w.-]+)")
            yield _operation(x, types, found.get(fused, ()), times)


def _operation(x: Instruction, types: dict[str, str], body: Body, times: int) -> Operation:
    """One operation; `body` is what a fusion computes."""
    target = x.attribute(r'custom_call_target="([^"]*)"')
    read = [sum(sizes(types[name])) for name in x.operands]
    written = sizes(x.type)
    if body:
        parameters = {int(y.rest[1 : y.rest.index(")")]): y for y in body if _is(y, "parameter")}
        read = [read_bytes(body, parameters[i].name, whole) for i, whole in enumerate(read)]
        written = tuple(_written_bytes(body))
    elif x.operation == "dynamic-update-slice":
        read = read[1:]
        written = (read[0],)
    elif x.operation in ("slice", "dynamic-slice"):
        read = [sum(written), *read[1:]]
    elif target and target.startswith("__cu") and re.search(r"\b[su]8\[\d+\]\S*\)$", x.type):
        written = written[:-1]  # a workspace
    return Operation(
        target or x.operation,
        tuple(read),
        written,
        "output_to_operand_aliasing" in x.rest,
        times,
        frozenset(y.operation for y in body) - FREE or frozenset({x.operation}),
        frozenset(y.attribute(r'op_name="([^"]*)"') or "" for y in (x, *body)),
    )


def _is(x: Instruction, *operations: str) -> bool:
    return x.operation in operations


def read_bytes(body: Body, name: str, whole: int) -> int:
    """Bytes that a fusion reads of its parameter `name` of `whole` bytes; only slices if it can."""
    types = {x.name: x.type for x in body}
    elements = math.prod(extents(types[name]))
    slices: dict[str, float] = {}  # what is sliced -> share of the whole

    def follow(name: str) -> bool:
        """Adds what is read through `name`; False if that is everything."""
        for x in (x for x in body if name in x.operands):
            sliced = name not in x.operands[1:]  # and no index
            if _is(x, "slice") or (_is(x, "dynamic-slice") and sliced):
                part = math.prod(extents(x.type)) / elements
                slices[f"{x.operands[1:]} {x.rest.split(', metadata=')[0]}"] = part
            elif _is(x, "dynamic-update-slice") and sliced:
                continue
            elif x.root or not (_passes(x, types[name]) and follow(x.name)):
                return False
        return True

    return min(whole, round(whole * sum(slices.values()))) if follow(name) else whole


def _passes(x: Instruction, operand: str) -> bool:
    """Whether an element of the result needs a single element of an operand of this type."""
    same = x.operation in ELEMENTWISE and extents(x.type) == extents(operand)
    return same or _is(x, "bitcast")


def extents(shape: str) -> tuple[int, ...]:
    """Axes of an array's HLO type."""
    return tuple(int(n) for n in re.match(r"\w+\[([\d,]*)\]", shape)[1].split(",") if n)


def _written_bytes(body: Body) -> Iterator[int]:
    """Bytes of each result of a fusion; of one that is updated in place, of the update."""
    made = {x.name: x for x in body}

    def of(x: Instruction) -> int:
        if _is(x, "bitcast"):
            return of(made[x.operands[0]])
        return sum(sizes(made[x.operands[1]].type if _is(x, "dynamic-update-slice") else x.type))

    root = next(x for x in body if x.root)
    yield from map(of, [made[name] for name in root.operands] if _is(root, "tuple") else [root])


def kind_of(operation: Operation) -> str:
    """Which of KINDS an operation belongs to.

    What computes anything of the scopes "attention", "norm" and "optimizer", of models and training
    steps, belongs to them, for example a residual connection that XLA fuses with a norm.
    """
    if operation.parts & PRODUCTS or re.match(r"__cublas|__cudnn\$conv", operation.kind):
        return "products"
    if re.match(r"__cudnn\$fmha|__gpu\$xla.gpu.triton|mosaic", operation.kind):
        return "attention"
    scopes = set(re.findall(r"\b(attention|norm|optimizer)\b", " ".join(operation.scopes)))
    for scope in ("attention", "norm", "optimizer"):
        if scope in scopes:
            return scope
    if any(part.startswith("reduce") for part in operation.parts):
        return "reductions"
    return "copies" if operation.parts <= MOVING else "elementwise"


def by_kind(operations: Sequence[Operation]) -> dict[str, dict[str, int]]:
    """Kind -> launches, how many of them are tiny, and bytes."""
    totals = {kind: {"launches": 0, "tiny": 0, "bytes": 0} for kind in KINDS}
    for x in operations:
        total = totals[kind_of(x)]
        total["launches"] += x.times
        total["tiny"] += x.times * (x.bytes < TINY)
        total["bytes"] += x.times * x.bytes
    return totals
