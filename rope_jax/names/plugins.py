"""Plug-ins: modules of yours that register positional schemes, models and image sources.

They are imported by name, from three places:

- `--plugins=my_schemes` of every command (repeatable), and `plugins` in a recipe;
- the environment variable ROPE_JAX_PLUGINS: `my_schemes,more_schemes`;
- the entry points `rope_jax.plugins` of installed packages.

A run records in its config.json the names that were given, and the entry points that registered
what it uses. Whatever loads the run imports them again, so modules must be installed, in PYTHONPATH
or in the current folder. docs/own_scheme.md has an example.
"""

import functools
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from rope_jax.names.text import find_line
from rope_jax.system.files import warn

VARIABLE = "ROPE_JAX_PLUGINS"
ENTRY_POINTS = "rope_jax.plugins"

# Plug-in -> names that it registered, in the order of loading. None stands for a plug-in that was
# asked for by name, or whose module had been imported before.
_loaded: dict[str, set[str] | None] = {}
_importing: list[set[str]] = []  # what the modules being imported have registered, inner ones last


def registered(name: str) -> None:
    """Notes a scheme, model, head or image source as that of the plug-ins being imported."""
    for names in _importing:
        names.add(name)


def needed(text: str) -> tuple[str, ...]:
    """Names of the loaded plug-ins that belong to a run or a model.

    These are all that were asked for by name, and the entry points that registered what is used.

    Args:
        text: that contains the names of model, schemes, head and image source.
    """
    words = set(re.findall(r"\w+", text))
    return tuple(name for name, own in _loaded.items() if own is None or own & words)


def loaded() -> tuple[str, ...]:
    """Names of the plug-ins that have been imported, in this order."""
    return tuple(_loaded)


def load(names: Iterable[str], *, wanted_by: str = "--plugins") -> None:
    """Imports plug-ins, unless they have been imported before.

    >>> load(["no_such_module"])
    Traceback (most recent call last):
    ValueError: plug-in 'no_such_module' (--plugins) cannot be imported: ModuleNotFoundError: ...

    Args:
        names: of modules: "my_schemes", "my_package.schemes".
        wanted_by: where the names come from, for error messages.

    Raises:
        ValueError: there is no such module, or importing it raises an exception.
    """
    for name in names:
        _import(name, wanted_by)
        _loaded[name] = None


def _import(name: str, wanted_by: str) -> set[str] | None:
    """Imports a plug-in; returns what it registered, or None if it had been imported before."""
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:  # as for `python -m`, but last
        sys.path.append(folder)
    if name in sys.modules:
        return None
    names: set[str] = set()
    _importing.append(names)
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        advice = (
            "; write my_schemes for a file my_schemes.py, and install it, run from its folder, or "
            "add that folder to PYTHONPATH"
        )
        missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        raise ValueError(
            f"plug-in {name!r} ({wanted_by}) cannot be imported: {type(error).__name__}: "
            f"{error}{find_line(error)}{advice if missing else ''}"
        ) from error
    finally:
        _importing.pop()
    return names


def named_in(config: Any) -> list[str]:
    """The plug-ins in a run's stored config; none in one that is damaged.

    >>> named_in({"plugins": ["my_schemes"]}), named_in({"plugins": "my_schemes"})
    (['my_schemes'], [])

    Args:
        config: the value of a JSON file, which may be anything.
    """
    names = config.get("plugins") if isinstance(config, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return []
    return names


@functools.cache
def load_installed() -> None:
    """Imports the plug-ins of ROPE_JAX_PLUGINS and of entry points, once.

    One that cannot be imported is a warning: a program may not need it.
    """
    named = filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(",")))
    found = [(name, VARIABLE) for name in named]
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        package = "a package" if point.dist is None else point.dist.name
        found.append((point.module, f"entry point {point.name} of {package}"))
    for name, origin in found:
        try:
            names = _import(name, origin)
        except ValueError as error:
            warn(f"WARNING: {error}")
        else:
            _loaded.setdefault(name, None if origin == VARIABLE else names)
