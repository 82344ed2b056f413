"""What belongs to a checkpoint on disk: a manifest with the size and hash of every other file.

A file that differs from the manifest is damage. A file that cannot be read at the moment (a failing
network, too few file handles) tells nothing: it is tried again, and then an error, so that no good
checkpoint is taken for a damaged one.
"""

import json
import os
import pathlib
from collections.abc import Iterator

from rope_jax.files import (
    RETRY_AFTER,
    file_sha256,
    read_regular,
    retried,
    sync_folder,
    write_file,
)

MANIFEST = "manifest.json"
_LARGEST = 1 << 28  # bytes of a manifest: those of millions of files


class Damaged(ValueError):
    """A checkpoint differs from what was written."""


def seal(folder: pathlib.Path, step: int) -> None:
    """Writes the manifest of the files in a folder, and syncs all of it to the disk."""
    files = {}
    for name, path in sorted(files_of(folder)):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    write_file(folder / MANIFEST, manifest(step, files))
    for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        sync_folder(path)


def problem_of(folder: pathlib.Path, step: int) -> str | None:
    """A description of the damage to the files of a step; None for a valid step.

    Raises:
        OSError: they cannot be read, now and after several more attempts.
    """
    try:
        return retried(lambda: _problem(folder, step), RETRY_AFTER)
    except OSError as error:
        raise OSError(
            error.errno,
            f"checkpoint {folder} cannot be read ({os.strerror(error.errno or 0)}); it may be "
            "intact and was not renamed. Start again once it can be read",
            error.filename,
        ) from error


def _problem(folder: pathlib.Path, step: int) -> str | None:
    try:
        found = dict(files_of(folder))  # first of all, so that only plain files are ever opened
        if MANIFEST not in found:
            return f"{MANIFEST} is missing"
        expected = _read_manifest(found.pop(MANIFEST), step)
        different = sorted(expected.keys() ^ found.keys())
        if different:
            missing = different[0] in expected
            return f"{different[0]} {'is missing' if missing else 'does not belong to it'}"
        for name, path in found.items():
            size, written = path.stat().st_size, expected[name]
            if size != written["bytes"]:
                return f"{name} has {size} bytes, not {written['bytes']}"
            if file_sha256(path) != written["sha256"]:
                return f"the bytes of {name} are not those that were written"
    except FileNotFoundError as error:
        return f"{pathlib.Path(error.filename or '').name} is missing"
    except Damaged as error:
        return str(error)
    return None


def _read_manifest(path: pathlib.Path, step: int) -> dict[str, dict]:
    try:
        text = read_regular(path, at_most=_LARGEST).decode()
        files = json.loads(text)["files"]
        same = text == manifest(step, files)  # no bit of the manifest may change
        same &= all(file.keys() == {"bytes", "sha256"} for file in files.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{MANIFEST} is not readable") from None
    if not same:
        raise Damaged(f"{MANIFEST} is not what was written")
    return files


def manifest(step: int, files: dict[str, dict]) -> str:
    """The text of the manifest of a step: `bytes` and `sha256` of its files by name."""
    return json.dumps({"format": 1, "step": step, "files": files}, indent=1, sort_keys=True) + "\n"


def files_of(folder: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """All files below a folder with their relative names.

    Raises:
        Damaged: there is a link or a special file.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                for name, path in files_of(pathlib.Path(entry.path)):
                    yield f"{entry.name}/{name}", path
            elif entry.is_file(follow_symlinks=False):
                yield entry.name, pathlib.Path(entry.path)
            else:
                raise Damaged(
                    f"{entry.name} is "
                    f"{'a symbolic link' if entry.is_symlink() else 'not a plain file'}"
                )
