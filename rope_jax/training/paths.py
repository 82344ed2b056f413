"""Paths for orbax, which interprets some characters of a path."""

import glob
import os
from collections.abc import Iterator

from orbax.checkpoint import v1 as ocp

_OrbaxPath = type(ocp.options.FileOptions().path_class("/"))


class LiteralPath(_OrbaxPath):
    """A path of orbax, whose own `glob` mistakes `[3e-3]` in the name of a folder for a pattern.

    Orbax uses it to find the files of each process, and merges nothing if it finds none.
    """

    def glob(self, pattern: str) -> Iterator["LiteralPath"]:
        return (self / name for name in glob.glob(pattern, root_dir=self))


def for_orbax(path: str | os.PathLike) -> LiteralPath:
    """The path without links: tensorstore reads `link/..` as the folder that holds the link."""
    return LiteralPath(os.path.realpath(path))


def require_storable(folder: str | os.PathLike) -> None:
    """Rejects a folder whose path orbax and tensorstore do not support.

    Raises:
        ValueError: it is not UTF-8, or has a backslash.
    """
    path = os.path.realpath(folder)
    if "\\" in path or any("\udc80" <= character <= "\udcff" for character in path):
        raise ValueError(
            f"no checkpoint can be stored in {path!a}: its path must be UTF-8 without a backslash; "
            "use another folder"
        )
