"""ImageNet-1k from its official archives, without unpacking them."""

import functools
import hashlib
import io
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rope_jax.data.images.decode import MAX_BYTES
from rope_jax.data.sources.index import Source, Staged, write_index
from rope_jax.files import cache_folder, open_regular, read_regular

TRAIN = "ILSVRC2012_img_train.tar"
VALIDATION = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
SYNSETS = "validation_synsets.txt"
_META, _TRUTH = "meta.mat", "ILSVRC2012_validation_ground_truth.txt"  # of the development kit
_KIT_BYTES = 1 << 24  # the official files are far smaller; larger ones are not read
_SYNSET = re.compile(r"n\d{8}")


class _File(NamedTuple):
    """A file in the archive: its name, first byte and length."""

    name: str
    start: int
    size: int


class ImageNet(Source):
    """One split of ImageNet-1k; "test" is the validation split.

    Images are in ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar. The labels of the validation
    images come from ILSVRC2012_devkit_t12.tar.gz (which needs scipy), or from
    validation_synsets.txt with one synset per line in the order of the files
    (ILSVRC2012_val_00000001.JPEG first). Classes are the synsets in the order of their numbers.
    The positions of the files in an archive are found once and kept in the cache folder.

    Args:
        path: the folder with the archives.
        split: "train" or "test".

    Raises:
        FileNotFoundError: an archive or the labels are missing.
        ValueError: an archive has unexpected content.
    """

    def __init__(self, path: str, split: str):
        archive = Path(path, TRAIN if split == "train" else VALIDATION).resolve()
        if not archive.is_file():
            raise FileNotFoundError(
                f"{archive} is missing; it is one of the archives that image-net.org hands out"
            )
        self._archive = archive
        facts = archive.stat()
        kits = [Path(path, SYNSETS), Path(path, DEVKIT)] if split == "test" else []
        labels = [kit.stat() for kit in kits if kit.is_file()]
        versions = [(kit.st_size, kit.st_mtime_ns) for kit in labels]
        key = f"2 {archive} {facts.st_size} {facts.st_mtime_ns} {versions}"
        super().__init__(
            cache_folder() / "imagenet" / hashlib.sha256(key.encode()).hexdigest()[:32]
        )
        if not self.cached():
            try:
                if split == "train":
                    found = sorted(_train_files(archive))
                else:
                    found = sorted(_validation_files(archive, Path(path)))
            except (tarfile.TarError, EOFError, zlib.error) as error:
                raise ValueError(
                    f"an archive in {path} cannot be read: {error}; was it downloaded completely?"
                ) from error
            if not found:
                raise ValueError(f"{archive} holds no images")
            synsets = sorted({synset for synset, _ in found})
            number = {synset: k for k, synset in enumerate(synsets)}
            with Staged(self.index) as folder:
                places = [(file.start, file.size) for _, file in found]
                write_index(
                    folder,
                    arrays={"places.npy": np.array(places, np.int64)},
                    labels=[number[synset] for synset, _ in found],
                    names=[f"{synset}/{file.name}" for synset, file in found],
                    class_names=synsets,
                    name="imagenet",
                    split=split,
                )

    def read(self, example: int) -> bytes:
        start, size = (int(number) for number in self._places[example])
        if size > MAX_BYTES:
            raise ValueError(f"the image has {size:,} bytes; allowed are {MAX_BYTES:,}")
        with open_regular(self._archive) as file:
            file.seek(start)
            return file.read(size)

    @functools.cached_property
    def _places(self) -> np.ndarray:
        return self.array("places.npy")

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_archive": self._archive}


def _files(archive: tarfile.TarFile, end: int, base: int = 0) -> Iterator[_File]:
    """Regular files of an open tar archive of `end` bytes that starts at byte `base` of a file."""
    for member in archive:
        if member.isfile():
            if member.issparse() or member.offset_data + member.size > end:
                raise tarfile.ReadError(f"{member.name!r} does not lie in it as a whole")
            yield _File(Path(member.name).name, base + member.offset_data, member.size)
        archive.members = []  # otherwise a million of them would be kept
    # tarfile accepts a file that was cut at or in the header of a member.
    if archive.offset + tarfile.BLOCKSIZE > end:
        raise tarfile.ReadError("it has no end")


def _train_files(path: Path) -> list[tuple[str, _File]]:
    """Synsets and files of the training archive, which holds one archive per synset."""
    found = []
    with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as outer:
        for inner in list(_files(outer, path.stat().st_size)):
            synset = inner.name.removesuffix(".tar")
            if not _SYNSET.fullmatch(synset):
                raise ValueError(
                    f"{path} holds {inner.name!r}, "
                    "which is not the archive of a synset (n01440764.tar)"
                )
            with path.open("rb") as window:
                window.seek(inner.start)
                part = _Window(window, inner.start, inner.size)
                with tarfile.open(fileobj=part, mode="r:") as archive:
                    found += [(synset, one) for one in _files(archive, inner.size, inner.start)]
    return found


def _validation_files(path: Path, folder: Path) -> list[tuple[str, _File]]:
    with tarfile.open(path, mode="r:") as archive:
        files = sorted(_files(archive, path.stat().st_size))
    synsets = _validation_synsets(folder)
    if len(files) != len(synsets):
        raise ValueError(
            f"{path} holds {len(files):,} images, but there are labels of {len(synsets):,}"
        )
    return list(zip(synsets, files, strict=True))


def _validation_synsets(folder: Path) -> list[str]:
    if (folder / SYNSETS).is_file():
        synsets = read_regular(folder / SYNSETS, at_most=_KIT_BYTES).decode().split()
        if wrong := [synset for synset in synsets if not _SYNSET.fullmatch(synset)]:
            raise ValueError(
                f"{folder / SYNSETS} has {wrong[0]!r} instead of a synset such as n01440764"
            )
        return synsets
    if not (folder / DEVKIT).is_file():
        raise FileNotFoundError(
            f"{folder} has neither {DEVKIT} nor {SYNSETS}: "
            "the labels of the validation images are missing"
        )
    from scipy.io import loadmat

    with tarfile.open(folder / DEVKIT) as devkit:
        small = [member for member in devkit if member.isfile() and member.size <= _KIT_BYTES]
        members = {Path(member.name).name: member for member in small}
        if missing := {_META, _TRUTH} - members.keys():
            raise ValueError(
                f"{folder / DEVKIT} holds no file {' and '.join(sorted(missing))} "
                f"of at most {_KIT_BYTES:,} bytes"
            )
        truth, meta = (devkit.extractfile(members[name]).read() for name in (_TRUTH, _META))
        numbers = [int(line) for line in truth.split()]
        table = loadmat(io.BytesIO(meta), squeeze_me=True, mat_dtype=False)["synsets"]
    synset_of = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table}
    if unknown := set(numbers) - synset_of.keys():
        some = ", ".join(map(str, sorted(unknown)[:8]))
        raise ValueError(f"{folder / DEVKIT} has labels without a synset: {some}")
    return [synset_of[number] for number in numbers]


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: Any, start: int, size: int):
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(min(len(buffer), max(0, self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
