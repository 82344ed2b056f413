"""Files of `torch.save`, and pickles of NumPy's arrays, read without running anything from them.

Such a file is a pickle with the numbers of its tensors next to it, or of its arrays in it. They are
mapped, not copied.
"""

import contextlib
import io
import mmap
import os
import struct
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from rope_jax.system.files import open_regular
from rope_jax.system.npz import Npz
from rope_jax.weights.pickles import PICKLE_BYTES, TOO_LONG, Array, Storage, Tensor, build

_RETRY = "; if it was downloaded, delete it and try again"
_LEGACY_MAGIC, _LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001
# Of training files, in this order; a state dict may also be the whole file.
_WRAPPERS = ("model", "state_dict", "module", "model_ema", "state_dict_ema")


@contextlib.contextmanager
def open_torch(path: str | os.PathLike) -> Iterator[Npz]:
    """Opens the state dict in a file of `torch.save`, of today's format (zip) or the older one.

    A pickle of a dictionary of NumPy arrays is read, too. The state dict may lie in a dictionary
    under "model", "state_dict", "module", "model_ema" or "state_dict_ema" (the first of these that
    has tensors, or else arrays), and its names may all begin with "module.". Everything else in
    the file is ignored.

    Raises:
        ValueError: it is no regular file, no such file, damaged, or needs what is not known here.
        OSError: it cannot be read.
    """
    path = os.fspath(path)
    with open_regular(path) as file:
        with _blame(path):
            begin = file.read(4)
            if begin != b"PK\x03\x04" and begin[:1] != b"\x80":
                raise ValueError(f"it begins with {begin!r}, as no such file does{_RETRY}")
            numbers = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if begin[:1] == b"\x80":
                content, offsets = _read_legacy(numbers)
            else:
                content, offsets = _read_zip(file)
            tensors = _state_dict(content, Tensor)
            arrays = {} if tensors else _state_dict(content, Array)
            shapes = {name: array.check() for name, array in arrays.items()}
            shapes |= {name: (x.shape, x.storage.dtype) for name, x in tensors.items()}
            if not shapes:
                keys = [repr(key)[:20] for key in content] if isinstance(content, dict) else []
                names = f" under {', '.join(_WRAPPERS)}, only {', '.join(keys[:5])}" if keys else ""
                raise ValueError(f"it has no dictionary of tensors{names}")
            for storage in {tensor.storage for tensor in tensors.values()}:
                if offsets[storage.key] + storage.size > len(numbers):
                    raise ValueError(f"storage {storage.key[:20]} ends after the file")

        def read(name: str) -> np.ndarray:
            with _blame(path):
                return arrays[name].read() if arrays else tensors[name].read(numbers, offsets)

        yield Npz(shapes, read)


def _read_zip(file: IO[bytes]) -> tuple[Any, dict[str, int]]:
    """The object of a zip archive, and the offsets of its storages in the file."""
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: member for member in archive.infolist()}
        folders = [name[:-8] for name in members if name.endswith("/data.pkl")]
        if len(folders) != 1:
            raise ValueError("the archive has no data.pkl, or several")
        (folder,) = folders

        def place(name: str) -> int:
            member = members[folder + name]
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                raise ValueError(f"{member.filename} is compressed or encrypted")
            file.seek(member.header_offset)
            header = struct.unpack("<4s22xHH", file.read(30))
            return member.header_offset + 30 + header[1] + header[2]

        def read(name: str) -> bytes:
            file.seek(place(name))
            if members[folder + name].file_size > PICKLE_BYTES:
                raise ValueError(TOO_LONG)
            return file.read(members[folder + name].file_size)

        if folder + "byteorder" in members and read("byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        storages: set[Storage] = set()
        content = build(io.BytesIO(read("data.pkl")), storages)
        for storage in storages:
            if members[f"{folder}data/{storage.key}"].file_size < storage.size:
                raise ValueError(f"storage {storage.key[:20]} has fewer than {storage.size} bytes")
        return content, {storage.key: place(f"data/{storage.key}") for storage in storages}


def _read_legacy(file: mmap.mmap) -> tuple[Any, dict[str, int]]:
    """The object of a file of PyTorch before 1.6, and the offsets of its storages.

    A file that does not begin with PyTorch's number is a pickle by itself.
    """
    first = build(file)
    if not isinstance(first, int):
        return first, {}
    if (first, build(file)) != (_LEGACY_MAGIC, _LEGACY_VERSION):
        raise ValueError("it begins with another object")
    if not build(file)["little_endian"]:
        raise ValueError("its numbers are big-endian")
    storages: set[Storage] = set()
    content = build(file, storages)
    by_key, offsets = {storage.key: storage for storage in storages}, {}
    keys, position = build(file), file.tell()
    for key in keys:
        if not isinstance(key, str) or key not in by_key:
            raise ValueError("it lists a storage that no tensor has")
        (count,) = struct.unpack("<q", file[position : position + 8])
        if count != by_key[key].count:
            raise ValueError(f"storage {key[:20]} has {count} numbers")
        offsets[key] = position + 8
        position += 8 + by_key[key].size
    return content, offsets


def _state_dict(content: Any, kind: type) -> dict[str, Any]:
    """The tensors, or arrays, of the state dict in an object by name; none without such a dict."""
    wrapped = map(content.get, _WRAPPERS) if isinstance(content, dict) else ()
    for entries in (*wrapped, content):
        if isinstance(entries, dict):
            tensors = {str(k): v for k, v in entries.items() if isinstance(v, kind)}
            if tensors:
                prefix = "module." if all(k.startswith("module.") for k in tensors) else ""
                return {k.removeprefix(prefix): v for k, v in tensors.items()}
    return {}


@contextlib.contextmanager
def _blame(path: str) -> Iterator[None]:
    """Turns what a damaged file raises into one sentence that names it."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
        Warning,  # of pickletools, where warnings are errors
        struct.error,
        zipfile.BadZipFile,
    ) as error:
        reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        reason += _RETRY if isinstance(error, zipfile.BadZipFile) else ""
        raise ValueError(f"{path} cannot be read as a state dict: {reason[:400]}") from None
