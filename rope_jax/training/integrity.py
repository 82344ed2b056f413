"""The manifest of a checkpoint on disk: the size and hash of every other file.

A step whose files differ from its manifest is damaged. Files that cannot be read at the moment (a
failing network, too few file handles) are an error instead, so that no good checkpoint is taken
for a damaged one.
"""

import json
import pathlib
import stat
from typing import Any

from rope_jax.system.files import file_sha256, sync, write_file

MANIFEST = "manifest.json"


class Damaged(ValueError):
    """A checkpoint differs from what was written."""


def seal(folder: pathlib.Path, step: int) -> None:
    """Syncs the files in a folder to the disk, and writes their manifest."""
    for path in folder.rglob("*"):
        sync(path)
    write_file(folder / MANIFEST, manifest(step, _describe(folder)))  # which syncs the folder


def find_problem(folder: pathlib.Path, step: int) -> str | None:
    """A description of the damage to the files of a step; None for a valid step.

    Raises:
        OSError: they cannot be read.
    """
    if not stat.S_ISDIR(folder.lstat().st_mode):
        return "it is not a folder of its own"
    files = _describe(folder)  # first of all, so that only plain files are ever opened
    if files.pop(MANIFEST, None) is None:
        return f"{MANIFEST} is missing"
    if (folder / MANIFEST).read_bytes() != manifest(step, files).encode():
        return f"its files are not those of its {MANIFEST}"
    return None


def manifest(step: int, files: dict[str, Any]) -> str:
    """The text of the manifest of a step: `bytes` and `sha256` of its files by name."""
    return json.dumps({"format": 1, "step": step, "files": files}, indent=1, sort_keys=True) + "\n"


def _describe(folder: pathlib.Path, prefix: str = "") -> dict[str, Any]:
    """Size and hash of all files below a folder by relative name; None for links, pipes, ..."""
    files: dict[str, Any] = {}
    for path in folder.iterdir():
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            files |= _describe(path, f"{prefix}{path.name}/")
        elif stat.S_ISREG(mode):
            files[prefix + path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        else:
            files[prefix + path.name] = None
    return files
