"""Plug-ins: your modules that register positional schemes, models and image sources.

They are imported by name, from three places:

- `--plugins=my_schemes` of every command (repeatable), and `plugins` in a recipe;
- the environment variable ROPE_JAX_PLUGINS: `my_schemes,more_schemes`;
- the entry points `rope_jax.plugins` of installed packages.

The config.json of a run records the names that were given, and the entry points that registered
names in use. They are imported again whenever the run is loaded, so modules must be installed, in
PYTHONPATH or in the current folder. docs/own_scheme.md has an example.
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
# requested by name, or whose module had been imported before.
_loaded: dict[str, set[str] | None] = {}
_importing: list[set[str]] = []  # names registered by the modules being imported, inner ones last


def note_name(name: str) -> None:
    """Notes the name of a scheme, model, head or image source for the plug-ins being imported."""
    for names in _importing:
        names.add(name)


def find_needed(text: str) -> tuple[str, ...]:
    """Names of the loaded plug-ins that belong to a run or a model.

    These are all that were requested by name, and the entry points that registered a name in use.

    Args:
        text: that contains the names of model, schemes, head and image source.
    """
    words = set(re.findall(r"\w+", text))
    return tuple(name for name, names in _loaded.items() if names is None or names & words)


def list_loaded() -> tuple[str, ...]:
    """Names of the plug-ins that have been imported, in this order."""
    return tuple(_loaded)


def load(names: Iterable[str], *, required_by: str = "--plugins") -> None:
    """Imports plug-ins, unless they have been imported before.

    >>> load(["no_such_module"])
    Traceback (most recent call last):
    ValueError: plug-in 'no_such_module' (--plugins) cannot be imported: ModuleNotFoundError: ...

    Args:
        names: of modules: "my_schemes", "my_package.schemes".
        required_by: where the names come from, for error messages.

    Raises:
        ValueError: there is no such module, or importing it raises an exception.
    """
    for name in names:
        _import(name, required_by)
        _loaded[name] = None


def _import(name: str, required_by: str) -> set[str] | None:
    """Imports a plug-in; returns the names that it registered, or None if already imported."""
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
            f"plug-in {name!r} ({required_by}) cannot be imported: {type(error).__name__}: "
            f"{error}{find_line(error)}{advice if missing else ''}"
        ) from error
    finally:
        _importing.pop()
    return names


def stored_names(stored: Any) -> list[str]:
    """Names of the plug-ins in a run's stored config; none if it is damaged.

    >>> stored_names({"plugins": ["my_schemes"]}), stored_names({"plugins": "my_schemes"})
    (['my_schemes'], [])

    Args:
        stored: the value of a JSON file, which may be anything.
    """
    names = stored.get("plugins") if isinstance(stored, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return []
    return names


@functools.cache
def load_installed() -> None:
    """Imports the plug-ins of ROPE_JAX_PLUGINS and of entry points, once.

    One that cannot be imported is a warning: a program may not need it.
    """
    variable_names = filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(",")))
    entries = [(name, VARIABLE) for name in variable_names]
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        package = "a package" if point.dist is None else point.dist.name
        entries.append((point.module, f"entry point {point.name} of {package}"))
    for name, origin in entries:
        try:
            names = _import(name, origin)
        except ValueError as error:
            warn(f"WARNING: {error}")
        else:
            _loaded.setdefault(name, None if origin == VARIABLE else names)
