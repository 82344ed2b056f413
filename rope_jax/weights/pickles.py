"""Pickles of tensors and arrays, of which nothing is run.

A pickle is a program that builds objects. The interpreter here knows the instructions and the few
functions that a state dict needs, and refuses all others by name.
"""

import dataclasses
import io
import math
import mmap
import pickletools
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

PICKLE_BYTES = 1 << 22  # a state dict of a thousand tensors has a few hundred thousand
TOO_LONG = (
    f"it has more than {PICKLE_BYTES >> 20} MiB of instructions and text, as which pickles of "
    "protocol 2 also spell arrays: save it with protocol 3 or newer"
)


@dataclasses.dataclass(frozen=True)
class Storage:
    """A row of `count` numbers of a dtype that tensors refer to."""

    key: str
    dtype: np.dtype
    count: int

    def __post_init__(self) -> None:
        _check_numbers(self.count)
        if not isinstance(self.key, str) or not isinstance(self.dtype, np.dtype):
            raise ValueError("a storage has no dtype, or a key that is no text")

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A view of a storage; offset and strides count numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if max(len(self.shape), len(self.strides)) > 16:  # tuples may be shared by many tensors
            raise ValueError("a tensor has more than 16 axes")
        _check_numbers(self.offset, *self.shape, *self.strides)
        steps = zip(self.shape, self.strides, strict=True)
        last = self.offset + sum((size - 1) * stride for size, stride in steps)
        if 0 not in self.shape and last >= self.storage.count:
            raise ValueError(f"a tensor of shape {self.shape} lies outside of its storage")

    def read(self, numbers: mmap.mmap, offsets: dict[str, int]) -> np.ndarray:
        """The tensor, a view of a file; `offsets` are those of its storages."""
        dtype = self.storage.dtype
        offset = offsets[self.storage.key] + self.offset * dtype.itemsize
        strides = tuple(stride * dtype.itemsize for stride in self.strides)
        return np.ndarray(self.shape, dtype, numbers, offset, strides)


class _Dtype:
    """A NumPy dtype: its kind with the bytes of a number, and their order once it is built."""

    def __init__(self, code: Any = None, *_: object) -> None:
        self.code, self.order = code, "|"

    def build(self, state: Any) -> None:
        self.order = state[1]

    def check(self) -> np.dtype:
        """The dtype; raises ValueError for one that is not of numbers."""
        texts = isinstance(self.code, str) and isinstance(self.order, str)
        text = self.order + self.code if texts else ""
        if not re.fullmatch(r"[<>=|](b1|[iu][1248]|f[248])", text):
            raise ValueError(f"an array has dtype {text[:20]!r}, which is not one of numbers")
        return np.dtype(text)


class Array:
    """A NumPy array, of which nothing is checked or read before it is needed."""

    def __init__(self, *_: object) -> None:
        self.state: Any = None

    def build(self, state: Any) -> None:
        self.state = state[-4:]  # a version comes first

    @classmethod
    def from_buffer(cls, data: Any, dtype: Any, shape: Any, order: Any) -> "Array":
        array = cls()
        array.state = (shape, dtype, order == "F", data)
        return array

    def check(self) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype; raises ValueError if they are not those of the array's bytes."""
        shape, dtype, _, data = self.state
        dtype = dtype.check()
        if not isinstance(shape, tuple) or len(shape) > 16:
            raise ValueError("an array has no shape, or more than 16 axes")
        _check_numbers(*shape)
        if not isinstance(data, bytes | bytearray | memoryview | str):
            raise ValueError("an array has no bytes")
        if math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"an array of shape {shape} and dtype {dtype} has {len(data)} bytes")
        return shape, dtype

    def read(self) -> np.ndarray:
        """The array, a view of its bytes."""
        shape, dtype = self.check()
        _, _, by_columns, data = self.state
        # Protocol 2 has no type for bytes, and spells them as text.
        data = data.encode("latin-1") if isinstance(data, str) else data
        return np.ndarray(shape, dtype, data, order="F" if by_columns else "C")


class _Ignored:
    """In place of an object that weights do not need, such as the arguments of a training."""

    def __init__(self, *arguments: object) -> None:
        del arguments


def _check_numbers(*numbers: Any) -> None:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a size, stride or offset is no natural number")


def _rebuild_tensor(*arguments: Any) -> Tensor:
    """A tensor of torch's storage, offset, shape, strides, requires_grad, hooks, perhaps flags."""
    if any(arguments[6:]):  # that the numbers stand for their negative or conjugate
        raise ValueError("a tensor is a lazy view of another")
    return Tensor(*arguments[:4])


_STORAGES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
_BUILTINS = ("builtins", "__builtin__")  # of Python 3 and 2
_CORES = ("core", "_core")  # of NumPy 1 and 2
# Of the settings and schedules in training files.
_PLAIN = ("set", "frozenset", "list", "dict", "int", "float", "complex", "range", "slice")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
_KNOWN = {
    "collections OrderedDict": lambda: {},
    "torch Size": lambda sizes: tuple(sizes[:17]),
    "torch._utils _rebuild_tensor": Tensor,
    "torch._utils _rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils _rebuild_parameter": lambda data, *_: data,
    "torch._utils _rebuild_parameter_with_state": lambda data, *_: data,
    **{f"torch {name}Storage": jnp.dtype(dtype) for name, dtype in _STORAGES.items()},
    "argparse Namespace": _Ignored,
    "yacs.config CfgNode": _Ignored,  # of Swin's training files
    **{f"{module} {kind}": _Ignored for module in _BUILTINS for kind in _PLAIN},
    **{f"collections {kind}": _Ignored for kind in ("Counter", "defaultdict")},
    **{f"pathlib {kind}": _Ignored for kind in ("PosixPath", "WindowsPath")},
    **{f"torch {name}": _Ignored for name in ("device", *_DTYPES)},
    **{f"{module} bytes": lambda: b"" for module in _BUILTINS},  # empty ones of protocol 2
    "numpy dtype": _Dtype,
    "numpy ndarray": _Ignored,  # only named, as the type to reconstruct
    **{f"numpy.{core}.multiarray _reconstruct": Array for core in _CORES},
    **{f"numpy.{core}.numeric _frombuffer": Array.from_buffer for core in _CORES},
    **{f"numpy.{core}.multiarray scalar": _Ignored for core in _CORES},
    "_codecs encode": lambda text, *_: text,  # of an array's bytes
}


# Instructions whose argument is a value.
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINBYTES"}
_VALUES |= {"BINUNICODE", "SHORT_BINUNICODE", "BINSTRING", "SHORT_BINSTRING"}
_BYTES = ("BINBYTES", "BINBYTES8", "BYTEARRAY8")


def build(file: io.BytesIO | mmap.mmap, storages: set[Storage] | None = None) -> Any:
    """Builds the object that a pickle describes, and adds its storages to `storages`.

    `pickletools` only splits the pickle into instructions; what they do is written here. The bytes
    of arrays stay in the file; all else may have `PICKLE_BYTES`.
    """
    left = PICKLE_BYTES
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def pop_to_mark() -> list[Any]:
        mark = marks.pop()
        items = stack[mark:]
        del stack[mark:]
        return items

    def call(arguments: tuple[Any, ...]) -> None:
        if len(arguments) > 16:
            raise ValueError(f"a function has {len(arguments)} arguments")
        stack.append(stack.pop()(*arguments))

    def set_items(items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):  # hashing of nested tuples has no limit of depth
                raise ValueError(f"a dictionary has a key of type {type(key).__name__}")
            if not isinstance(stack[-1], _Ignored):
                stack[-1][key] = value

    for opcode, value, start in pickletools.genops(file):
        end = file.tell()
        left -= 0 if opcode.name in _BYTES else end - start
        if left < 0:
            raise ValueError(TOO_LONG)
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case name if name in _BYTES:
                mapped = isinstance(file, mmap.mmap)
                stack.append(memoryview(file)[end - len(value) : end] if mapped else value)
            case name if name in _VALUES:
                stack.append(value)
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE":
                stack.append(tuple(pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                size = int(opcode.name[-1])
                stack[-size:] = [tuple(stack[-size:])]
            case "EMPTY_SET":
                stack.append(_Ignored())
            case "ADDITEMS":
                pop_to_mark()
            case "FROZENSET":
                pop_to_mark()
                stack.append(_Ignored())
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                items = pop_to_mark()
                stack[-1].extend(items)
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM":
                item = stack[-2:]
                del stack[-2:]
                set_items(item)
            case "SETITEMS":
                set_items(pop_to_mark())
            case "GLOBAL":
                stack.append(_known(value))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                if not isinstance(name, str) or not isinstance(module, str):
                    raise ValueError("a global name is no text")  # whose text may have no end
                stack.append(_known(f"{module} {name}"))
            case "REDUCE" | "NEWOBJ":
                call(stack.pop())
            case "BUILD":  # attributes, which nothing else here needs
                state = stack.pop()
                if isinstance(stack[-1], Array | _Dtype):
                    stack[-1].build(state)
            case "BINPERSID" if storages is not None:
                _, dtype, key, _, count, *_ = stack.pop()
                storages.add(storage := Storage(key, dtype, count))
                stack.append(storage)
            case name:
                raise ValueError(f"it has the instruction {name}, which no state dict needs")
    raise ValueError("it has no end")


def _known(name: Any) -> Any:
    """The object that a global name stands for."""
    if name not in _KNOWN:
        raise ValueError(
            f"it needs {name.replace(' ', '.', 1)[:200]!r}, which no state dict does, and which is "
            "not run; with PyTorch, load the file if you trust it, and save its state dict alone "
            "and in float32"
        )
    return _KNOWN[name]
