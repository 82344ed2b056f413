"""Instructions of one lane: arithmetic, logic, comparisons, conversions and moves.

PTX ISA, sections 9.7.1 to 9.7.9 (arithmetic, comparison, logic, shift, data movement). `.ftz` takes
subnormal numbers for zeros. Approximations (`.approx`, `.full`) are float64 here, rounded once.
"""

import functools
import operator

import numpy as np

from tests.ptx.parse import elements
from tests.ptx.program import TYPES, bits, executes, instruction, read, write

MODIFIERS = {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "satfinite", "relu"}
ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def flush(x):
    """Replaces subnormal float32 by zeros of their sign."""
    tiny = np.abs(x) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), x), x).astype(np.float32)


def in_double(f):
    """f of float64 arguments, rounded to the arguments' type."""
    return lambda *x: f(*(y.astype(np.float64) for y in x)).astype(x[0].dtype)


def in_pairs(f):
    """f of both float32 in registers of 64 bits (f32x2)."""

    def of_pairs(*x):
        pairs = f(*(np.asarray(y)[..., None].view(np.float32) for y in x))
        return np.ascontiguousarray(pairs).view(np.uint64)[..., 0]

    return of_pairs


def define(name, choose):
    """An instruction on operands of its type; `choose(instruction)` is the function of them."""

    @instruction(name)
    def make(x, program):
        f, put = choose(x), program.write(x.operands[0])
        reads = [program.read(operand, x.kind) for operand in x.operands[1:]]
        flushed = (lambda *y: flush(f(*map(flush, y)))) if "ftz" in x.parts else f
        whole = in_pairs(flushed) if x.kind == "f32x2" else flushed
        return lambda m, on: put(m, on, whole(*(read(m) for read in reads)))


def always(f):
    return lambda x: f


define("add", always(operator.add))  # d = a + b
define("sub", always(operator.sub))  # d = a - b
define("and", always(operator.and_))  # d = a & b
define("or", always(operator.or_))  # d = a | b
define("xor", always(operator.xor))  # d = a ^ b
define("not", always(operator.invert))  # d = ~a
define("neg", always(operator.neg))  # d = -a
define("ex2", always(in_double(np.exp2)))  # d = 2 ** a
define("lg2", always(in_double(np.log2)))  # d = log2(a)
define("rcp", always(in_double(lambda a: 1 / a)))  # d = 1 / a
# d = a * b + c, rounded once (the product of two float32 is exact in float64).
define("fma", always(in_double(lambda a, b, c: a * b + c)))


def choose_extremum(number, nan):
    """d = max or min of two or three: those that are not NaN or, with .NaN, NaN if one is."""

    def choose(x):
        f = nan if "NaN" in x.parts or x.kind[0] != "f" else number
        return lambda *operands: functools.reduce(f, operands)

    return choose


define("max", choose_extremum(np.fmax, np.maximum))
define("min", choose_extremum(np.fmin, np.minimum))


def multiply(x):
    """d = a * b; of whole numbers the lower half (.lo), the upper half (.hi) or all (.wide)."""
    if x.kind[0] == "f" or "lo" in x.parts:
        return operator.mul
    if x.kind == "u64" and "hi" in x.parts:
        return multiply_high
    size = bits(x.kind)
    double = TYPES[f"{x.kind[0]}{2 * size}"]
    if "wide" in x.parts:
        return lambda a, b: a.astype(double) * b.astype(double)
    return lambda a, b: (a.astype(double) * b.astype(double) >> size).astype(a.dtype)


def multiply_high(a, b):
    """The upper half of the product of numbers of 64 bits, by halves."""
    (a1, a0), (b1, b0) = ((x >> np.uint64(32), x & np.uint64(0xFFFFFFFF)) for x in (a, b))
    upper = a1 * b0 + (a0 * b0 >> np.uint64(32))
    lower = a0 * b1 + (upper & np.uint64(0xFFFFFFFF))
    return a1 * b1 + (upper >> np.uint64(32)) + (lower >> np.uint64(32))


define("mul", multiply)


def wide_kind(x):
    return f"{x.kind[0]}{2 * bits(x.kind)}" if "wide" in x.parts else x.kind


@executes(
    "mad",
    put=write(0),
    a=read(1),
    b=read(2),
    c=lambda x, program: program.read(x.operands[3], wide_kind(x)),
    product=lambda x, program: multiply(x),
)
def _mad(m, on, x, put, a, b, c, product):
    """d = a * b + c, the product as of mul; with .wide, c and d have twice the bits."""
    put(m, on, product(a(m), b(m)) + c(m))


def divide(x):
    """d = a / b, of whole numbers towards zero."""
    if x.kind[0] == "f":
        return in_double(operator.truediv)
    if x.kind[0] == "u":
        return lambda a, b: a // np.maximum(b, 1)
    return lambda a, b: np.trunc(a.astype(np.float64) / b).astype(a.dtype)


define("div", divide)


@executes(
    "shl",
    "shr",
    put=write(0),
    a=lambda x, program: program.read(x.operands[1], x.kind.replace("b", "u")),
    n=read(2, "u32"),
)
def _shift(m, on, x, put, a, n):
    """d = a << n or a >> n; n beyond the width counts as the width; .s fills with the sign."""
    values, by, last = a(m), n(m), bits(x.kind) - 1
    shift = np.left_shift if x.parts[0] == "shl" else np.right_shift
    out = shift(values, np.minimum(by, last).astype(values.dtype))
    put(m, on, out if x.kind[0] == "s" else np.where(by > last, values.dtype.type(0), out))


@executes("bfe", put=write(0), a=read(1), p=read(2, "u32"), n=read(3, "u32"))
def _bfe(m, on, x, put, a, p, n):
    """d = the n bits of a from bit p on, here inside of the word; .s repeats the uppermost."""
    values, first, count, width = a(m), p(m), n(m), bits(x.kind)
    if ((first + count > width) | (count == 0)).any():
        raise NotImplementedError(str(x))
    top = values << (width - first - count).astype(values.dtype)
    put(m, on, top >> (width - count).astype(values.dtype))


def _unordered(compare):
    """Also true where one operand is NaN."""
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
COMPARISONS |= {f"{name}u": _unordered(f) for name, f in COMPARISONS.items()} | {
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}
JOINS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


@instruction("setp")
def _setp(x, program):
    """p = a compares to b, joined with c by a logical operation if there is one."""
    how = x.parts[1]
    a, b = (program.read(operand, x.kind) for operand in x.operands[1:3])
    compare, put = COMPARISONS[how], program.write(x.operands[0])
    if how == "ne" and x.kind[0] == "f":  # false for NaN, unlike NumPy's
        compare = lambda a, b: (a < b) | (a > b)
    if x.parts[2] not in JOINS:
        return lambda m, on: put(m, on, compare(a(m), b(m)))
    join, c = JOINS[x.parts[2]], program.read(x.operands[3], "pred")
    return lambda m, on: put(m, on, join(compare(a(m), b(m)), c(m)))


@executes("selp", put=write(0), a=read(1), b=read(2), c=read(3, "pred"))
def _selp(m, on, x, put, a, b, c):
    """d = a if c else b."""
    put(m, on, np.where(c(m), a(m), b(m)))


@instruction("mov", "cvta")
def _mov(x, program):
    """d = a; a vector is the parts of a register, lowest first. Generic addresses are equal."""
    to, source = x.operands
    names = elements(to if to[0] == "{" else source)
    part, whole = bits(x.kind) // len(names), f"u{bits(x.kind)}"
    if to[0] == "{":
        read, puts = program.read(source, whole), [program.write(name) for name in names]

        def split(m, on):
            for i, put in enumerate(puts):
                put(m, on, (read(m) >> part * i).astype(f"u{part // 8}"))

        return split
    put = program.write(to)
    if source[0] != "{":
        read = program.read(source, x.kind)
        return lambda m, on: put(m, on, read(m))
    reads = [program.read(name, f"u{part}") for name in names]

    def join(m, on):
        values = [read(m).astype(TYPES[whole]) << part * i for i, read in enumerate(reads)]
        put(m, on, np.bitwise_or.reduce(np.broadcast_arrays(*values)))

    return join


def widen(x):
    """bfloat16 as bits to float32."""
    return (np.asarray(x).astype(np.uint32) << 16).view(np.float32)


def narrow(x):
    """float32 to bfloat16 as bits, to nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = u + 0x7FFF + (u >> 16 & 1) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def to_half(x):
    return np.asarray(x, np.float32).astype(np.float16).view(np.uint16)


@instruction("cvt")
def _cvt(x, program):
    """d = a in another type; to whole numbers with saturation, NaN as 0. x2 packs a above b."""
    to, source = (part for part in x.parts[1:] if part not in MODIFIERS)
    put, modifiers = program.write(x.operands[0]), MODIFIERS.intersection(x.parts)
    if not modifiers <= {"rn", *ROUNDINGS, "ftz"}:
        raise NotImplementedError(str(x))
    if to in ("bf16x2", "f16x2"):
        high, low = (program.read(operand, "f32") for operand in x.operands[1:3])
        half = narrow if to == "bf16x2" else to_half
        return lambda m, on: put(m, on, half(high(m)).astype(np.uint32) << 16 | half(low(m)))
    read = program.read(x.operands[1], source)
    if "bf16" in (to, source):
        if "f32" not in (to, source):
            raise NotImplementedError(str(x))
        convert = narrow if to == "bf16" else widen
        return lambda m, on: put(m, on, convert(read(m)))
    dtype, rounding = TYPES[to], next((ROUNDINGS[y] for y in modifiers if y in ROUNDINGS), None)

    def step(m, on):
        values = read(m) if rounding is None else rounding(read(m))
        if source[0] == "f" and to[0] != "f":
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
            over = values >= high
            values = np.where(np.isnan(values) | over, 0, np.maximum(values, low)).astype(dtype)
            values = np.where(over, dtype(high), values)
        put(m, on, values.astype(dtype))

    return step
