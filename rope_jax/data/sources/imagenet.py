"""ImageNet-1k from its official archives, without unpacking them."""

import functools
import io
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rope_jax.data.images.decode import MAX_BYTES
from rope_jax.data.sources.index import Source, cache_index, write_index
from rope_jax.system.files import open_regular, read_regular

TRAIN = "ILSVRC2012_img_train.tar"
VALIDATION = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
SYNSETS = "validation_synsets.txt"
_KIT_BYTES = 1 << 24  # of a file of labels
_META, _TRUTH = "meta.mat", "ILSVRC2012_validation_ground_truth.txt"  # of the development kit


_File = tuple[str, int, int]  # in an archive: its name, first byte and length


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
        ValueError: an archive is damaged, or labels do not match the images.
    """

    def __init__(self, path: str, split: str):
        archive = Path(path, TRAIN if split == "train" else VALIDATION).resolve()
        self._archive = archive
        with open_regular(archive):  # tarfile would wait for the content of a pipe
            facts = archive.stat()
        kits = [Path(path, SYNSETS), Path(path, DEVKIT)] if split == "test" else []
        labels = [kit.stat() for kit in kits if kit.is_file()]
        versions = [(kit.st_size, kit.st_mtime_ns) for kit in labels]
        key = f"2 {archive} {facts.st_size} {facts.st_mtime_ns} {versions}"
        write = functools.partial(self._write, path=Path(path), split=split)
        super().__init__(cache_index("imagenet", key, write))

    def read(self, example: int) -> bytes:
        start, size = self.array("places.npy")[example].tolist()
        with self._archive.open("rb") as file:
            file.seek(start)
            return file.read(min(size, MAX_BYTES + 1))  # larger files are refused

    def _write(self, folder: Path, path: Path, split: str) -> None:
        find = _train_files if split == "train" else _validation_files
        try:
            files = sorted(find(self._archive, path))
        except (tarfile.TarError, EOFError, zlib.error, KeyError) as error:
            raise ValueError(
                f"an archive in {path} cannot be read: {error}; was it downloaded completely?"
            ) from error
        synsets = sorted({synset for synset, _ in files})
        number = {synset: k for k, synset in enumerate(synsets)}
        write_index(
            folder,
            arrays={"places.npy": np.array([file[1:] for _, file in files], np.int64)},
            labels=[number[synset] for synset, _ in files],
            names=[f"{synset}/{name}" for synset, (name, *_) in files],
            class_names=synsets,
            name="imagenet",
            split=split,
        )


def _train_files(path: Path, folder: Path) -> Iterator[tuple[str, _File]]:
    """Synsets and files of the training archive, which holds one archive per synset."""
    with tarfile.open(path, mode="r:") as outer:
        for inner in filter(tarfile.TarInfo.isfile, outer.getmembers()):
            with tarfile.open(fileobj=outer.extractfile(inner), mode="r:") as archive:
                for file in _files(archive, inner.offset_data):
                    yield Path(inner.name).stem, file


def _validation_files(path: Path, folder: Path) -> list[tuple[str, _File]]:
    with tarfile.open(path, mode="r:") as archive:
        files = sorted(_files(archive))
    synsets = _validation_synsets(folder)
    if len(files) != len(synsets):
        raise ValueError(
            f"{path} holds {len(files):,} images, but there are labels of {len(synsets):,}"
        )
    return list(zip(synsets, files, strict=True))


def _files(archive: tarfile.TarFile, base: int = 0) -> Iterator[_File]:
    """Regular files of an open tar archive that starts at byte `base` of a file."""
    for member in archive:
        if member.isfile():
            yield Path(member.name).name, base + member.offset_data, member.size


def _validation_synsets(folder: Path) -> list[str]:
    if (folder / SYNSETS).is_file():
        return read_regular(folder / SYNSETS, at_most=_KIT_BYTES).decode().split()
    if not (folder / DEVKIT).is_file():
        raise FileNotFoundError(
            f"{folder} has neither {DEVKIT} nor {SYNSETS}: "
            "the labels of the validation images are missing"
        )
    from scipy.io import loadmat

    with tarfile.open(folder / DEVKIT) as devkit:
        small = [x for x in devkit if x.isfile() and x.size <= _KIT_BYTES]
        members = {Path(member.name).name: member for member in small}
        truth, meta = (devkit.extractfile(members[name]).read() for name in (_TRUTH, _META))
    table = loadmat(io.BytesIO(meta), squeeze_me=True, mat_dtype=False)["synsets"]
    synsets = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table}
    return [synsets[int(line)] for line in truth.split()]
