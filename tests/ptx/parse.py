"""PTX text as instructions, with the names of scopes made unique."""

import dataclasses
import re

WIDTHS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64}
SHARED_START = 1024  # of a block's shared memory, so that an address of 0 is an error

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LINES_ONLY = re.compile(r"^[ \t]*\.(?:loc|file)\b[^\n]*", re.M)
# A brace of a scope, a label, or a statement, in which braces are those of vectors.
_STATEMENT = re.compile(r"\s*(?:([{}])|([$\w]+)\s*:(?!:)|((?:[^;{}]|\{[^{}]*\})*);)")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)[^,()\[\]]*?\s(\w+)(?:\[(\d+)\])?\s*(?=[,)]|$)"
)
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)(?:\[(\d*)\])?\s*;")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_NAME = re.compile(r"[%$]?[A-Za-z_][\w$]*")


@dataclasses.dataclass
class Instruction:
    """`@guard name operands`, as `@!%p1 add.f32 %f1, %f2, %f3`."""

    guard: tuple[str, bool] | None  # predicate, whether it is negated
    name: str
    operands: list[str]
    line: int

    def __str__(self):
        guard = f"@{'!' * self.guard[1]}{self.guard[0]} " if self.guard else ""
        return f"line {self.line}: {guard}{self.name} {', '.join(self.operands)}"

    @property
    def parts(self) -> list[str]:
        return self.name.split(".")

    @property
    def kind(self) -> str:
        """The last part of the name, which is the operands' type."""
        return self.parts[-1]


class Kernel:
    """The first entry of a PTX module.

    Attributes:
        params: names and bytes of its parameters.
        symbols: variables in shared memory -> address.
        static_shared: bytes of those of a known size.
        widths: registers -> bits.
        code: its instructions.
        labels: -> index of an instruction.
    """

    def __init__(self, text: str):
        text = _COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
        text = _LINES_ONLY.sub("", text)
        begin = text.index(".entry")
        body = text.index("{", begin)
        head = text[begin:body]
        self.name = re.match(r"\.entry\s+(\w+)", head)[1]
        self.params = [
            (name, int(n or int(bits) // 8)) for bits, name, n in _PARAMETER.findall(head)
        ]
        self._place_shared(text)
        self.widths, self.code, self.labels = {}, [], {}
        self._read_body(text, body)

    def _place_shared(self, text):
        self.symbols, place = {}, SHARED_START
        for align, name, size in _SHARED.findall(text):
            place = -(-place // int(align)) * int(align)
            self.symbols[name] = place
            place += int(size or 0)
        self.static_shared = place - SHARED_START

    def _read_body(self, text, place):
        scopes, inner, count = [], [], 0  # inner: instructions to rename, with their scopes
        line, counted = text.count("\n", 0, place) + 1, place
        while True:
            match = _STATEMENT.match(text, place)
            place = match.end()
            brace, label, statement = match.groups()
            if brace == "{":
                scopes.append((count, {}))
                count += 1
            elif brace == "}":
                scopes.pop()
                if not scopes:
                    break
            elif label:
                self.labels[self._declare(label, scopes)] = len(self.code)
            elif declared := re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement.strip(), re.S):
                self._declare_registers(*declared.groups(), scopes)
            elif not statement.lstrip().startswith("."):
                start = match.start(3) + len(statement) - len(statement.lstrip())
                line, counted = line + text.count("\n", counted, start), start
                self.code.append(self._instruction(statement.strip(), line))
                if len(scopes) > 1:
                    inner.append((self.code[-1], scopes[1:]))
        for instruction, around in inner:
            self._rename(instruction, around)

    @staticmethod
    def _declare(name, scopes):
        """A name of an inner scope gets the scope's number."""
        number, names = scopes[-1]
        if len(scopes) > 1:
            names[name] = f"{name}@{number}"
        return names.get(name, name)

    def _declare_registers(self, kind, names, scopes):
        width = WIDTHS.get(kind) or int(kind[1:])
        for name in map(str.strip, names.split(",")):
            several = re.match(r"(%?\w+)<(\d+)>", name)
            some = [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [name]
            self.widths |= {self._declare(each, scopes): width for each in some}

    @staticmethod
    def _instruction(statement, line):
        negated, guard, name, rest = _INSTRUCTION.match(statement).groups()
        return Instruction((guard, bool(negated)) if guard else None, name, split(rest), line)

    @staticmethod
    def _rename(instruction, scopes):
        def unique(match):
            name = match[0]
            return next((names[name] for _, names in reversed(scopes) if name in names), name)

        instruction.operands = [_NAME.sub(unique, x) for x in instruction.operands]
        if instruction.guard:
            name, negated = instruction.guard
            instruction.guard = _NAME.sub(unique, name), negated


def split(operands: str) -> list[str]:
    """Operands at commas, except those in brackets.

    >>> split("{%r1, %r2}, [%rd1+4], 7")
    ['{%r1, %r2}', '[%rd1+4]', '7']
    """
    found = re.findall(r"(?:[^,\[{]|\[[^\]]*\]|\{[^}]*\})+", operands)
    return [" ".join(x.split()) for x in found]


def elements(operand: str) -> list[str]:
    """The registers of a vector or of a pair, or the only one.

    >>> elements("{%r1, %r2}"), elements("%r1|%p1"), elements("%r1")
    (['%r1', '%r2'], ['%r1', '%p1'], ['%r1'])
    """
    return [x.strip() for x in re.split("[,|]", operand.strip("{} "))]


def registers(instruction: Instruction) -> tuple[set[str], set[str]]:
    """Registers that an instruction writes, and those that it reads."""
    found = [set(re.findall(r"%\w+[@\d]*", x)) for x in instruction.operands]
    is_result = not instruction.name.startswith(
        ("st.", "stmatrix", "bar", "mbarrier.arrive", "mbarrier.init", "cp.", "fence", "bra")
    )
    written = found.pop(0) if found and is_result else set()
    guard = {instruction.guard[0]} if instruction.guard else set()
    return written, guard.union(*found)
