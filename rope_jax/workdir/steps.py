"""The folders of a run's checkpoints: `<step>/`, and beside them those of unfinished or bad steps.

A step that is being written is `<step>.writing/`, one that is being removed `<step>.deleting/`, and
a damaged one `<step>.corrupt/`, which is never deleted.
"""

import os
import pathlib
import re
import shutil

from rope_jax.files import sync_folder
from rope_jax.workdir.integrity import Damaged

_STEP = re.compile(r"0|[1-9]\d*", re.ASCII)
# Leftovers of a crash: the only names that are ever deleted.
_UNFINISHED = re.compile(r"\d+\.(writing|deleting)(\..*)?")


def listed(folder: pathlib.Path) -> list[int]:
    """The steps in a folder, ascending.

    Raises:
        Damaged: something else than a folder (a link, a file) has the name of a step.
    """
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        numbered = [entry for entry in entries if _STEP.fullmatch(entry.name)]
        for entry in numbered:
            if not _is_step(entry):
                kind = "a link" if entry.is_symlink() else "not the folder of a step"
                raise Damaged(
                    f"{entry.path} is {kind}: put the folder of that step in its place, or "
                    "move it away to go on without that step"
                )
    return sorted(int(entry.name) for entry in numbered)


def present(folder: pathlib.Path) -> list[int]:
    """The steps in a folder, ascending, whatever else has the name of a step."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(int(entry.name) for entry in entries if _is_step(entry))


def _is_step(entry: os.DirEntry) -> bool:
    """Whether an entry of the folder is a step's: a folder of its own, named like 0 or 1000."""
    return bool(_STEP.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)


def remove_unfinished(folder: pathlib.Path) -> None:
    """Removes what saves and deletions left that were cut short."""
    with os.scandir(folder) as entries:
        left = [
            entry.path
            for entry in entries
            if _UNFINISHED.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    for path in left:
        shutil.rmtree(path)


def complete(written: pathlib.Path, step: int) -> None:
    """Renames a folder to that of its step; a step of that number is set aside."""
    folder = written.parent
    if os.path.lexists(folder / str(step)):
        set_aside(folder, step)
    written.rename(folder / str(step))
    sync_folder(folder)


def set_aside(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Renames a damaged step to `<step>.corrupt`, or `.corrupt.2` and so on."""
    number, target = 1, folder / f"{step}.corrupt"
    while os.path.lexists(target):
        number += 1
        target = folder / f"{step}.corrupt.{number}"
    (folder / str(step)).rename(target)
    return target


def delete(folder: pathlib.Path, step: int) -> None:
    """Deletes a step; renamed first, so that no part of it is ever taken for a complete one."""
    doomed = folder / f"{step}.deleting"
    shutil.rmtree(doomed, ignore_errors=True)
    (folder / str(step)).rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
