"""NumPy's .npz files from anywhere: names, types and shapes are known before an array is read."""

import contextlib
import dataclasses
import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from rope_jax.system.files import open_regular

# Exceptions of zipfile and NumPy for damaged files; RuntimeError: an encrypted member.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
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
        ValueError: it is not a regular file or not an .npz file, or a member is not an array.
        OSError: it cannot be read.
    """
    path = os.fspath(path)
    with open_regular(path) as file, contextlib.ExitStack() as stack:
        with _blame(f"{path} is not an .npz file, or damaged"):
            archive = stack.enter_context(zipfile.ZipFile(file))
        members = {name.removesuffix(".npy"): name for name in archive.namelist()}
        shapes = {}
        for name, member in members.items():
            with _blame(f"array {name} of {path} cannot be read"), archive.open(member) as content:
                shapes[name] = _header(content)

        def read(name: str) -> np.ndarray:
            # NumPy reads piece by piece: a header that lies about its size fills no memory.
            with (
                _blame(f"array {name} of {path} cannot be read"),
                archive.open(members[name]) as content,
            ):
                array = np.lib.format.read_array(content, allow_pickle=False)
                if content.read(1):  # zipfile compares the checksum at the end
                    raise ValueError("more follows than its header declares")
                return array

        yield Npz(shapes, read)


def _header(file: zipfile.ZipExtFile) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"npy version {version} is not read; write it with numpy.savez")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, dtype


@contextlib.contextmanager
def _blame(message: str) -> Iterator[None]:
    """Turns errors of zipfile and NumPy for a damaged file into a ValueError with this message."""
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(f"{message}: {error}") from None
