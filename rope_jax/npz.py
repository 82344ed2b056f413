"""NumPy's .npz files from anywhere: names, types and sizes are checked before memory is used."""

import contextlib
import dataclasses
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from rope_jax.files import open_regular

_KNOWN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what NumPy writes
_RATIO = 1032  # deflate compresses by at most that
# Exceptions of zipfile and NumPy for damaged files; RuntimeError: an encrypted member.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    ValueError,
    MemoryError,
    OverflowError,
    RuntimeError,  # and so NotImplementedError and RecursionError
)
Shapes = dict[str, tuple[tuple[int, ...], np.dtype]]


@dataclasses.dataclass(frozen=True)
class Npz:
    """An open .npz file.

    Attributes:
        shapes: shape and dtype of each array by name, from the headers.
        read: reads one array; ValueError if its content is damaged.
    """

    shapes: Shapes
    read: Callable[[str], np.ndarray]


@contextlib.contextmanager
def open_npz(path: str | os.PathLike) -> Iterator[Npz]:
    """Opens an .npz file and reads the headers of its arrays.

    >>> import tempfile
    >>> path = f"{tempfile.mkdtemp()}/arrays.npz"
    >>> np.savez(path, a=np.zeros((2, 3)))
    >>> with open_npz(path) as file:
    ...     file.shapes, file.read("a").sum()
    ({'a': ((2, 3), dtype('float64'))}, np.float64(0.0))

    Raises:
        ValueError: it is no regular file, or not an .npz file; two arrays share a name; a member is
            not an array of numbers, or not of the size that its header declares.
        OSError: it cannot be read.
    """
    path = os.fspath(path)
    with open_regular(path) as file, contextlib.ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(file))
        except _DAMAGE as error:
            file.seek(0)
            single = file.read(6) == b"\x93NUMPY"
            reason = "it holds a single array" if single else error
            raise ValueError(f"{path} is not an .npz file, or damaged: {reason}") from None
        shapes: Shapes = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name == member.filename:
                raise ValueError(f"{name!r} of {path} is not an array: its name has no .npy")
            if name in shapes:
                raise ValueError(f"{path} holds two arrays of the name {name!r}")
            try:
                shapes[name] = _header(archive, member)
            except _DAMAGE as error:
                raise ValueError(f"array {name} of {path} cannot be read: {error}") from None

        def read(name: str) -> np.ndarray:
            try:
                with archive.open(f"{name}.npy") as content:
                    return np.lib.format.read_array(content, allow_pickle=False)
            except _DAMAGE as error:
                raise ValueError(f"array {name} of {path} cannot be read: {error}") from None

        yield Npz(shapes, read)


def _header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype]:
    if member.compress_type not in _KNOWN or member.file_size > _RATIO * member.compress_size:
        raise ValueError("it is compressed in a way that numpy.savez does not use")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        # NumPy reads headers of later versions, of any length, before it checks them.
        if version != (1, 0):
            raise ValueError(f"npy version {version} is not read; write it with numpy.savez")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if dtype.hasobject:
            raise ValueError("it holds objects, which could run any program")
        declared, there = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
    if declared != there or min(shape, default=0) < 0:
        raise ValueError(f"its header declares {declared:,} bytes, and {there:,} follow")
    return shape, dtype
