"""Recipes by name: those of `configs/`, which come with the package."""

import importlib.util
import pathlib
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import ml_collections

from rope_jax.config.resolve import (
    ConfigError,
    blame,
    convert_setting,
    setting,
    setting_called,
    settings,
)
from rope_jax.names.notation import assignments, literal
from rope_jax.names.options import read
from rope_jax.names.text import closest, find_line, nearest


def _folder() -> pathlib.Path:
    """The folder of the recipes: inside an installed package, next to the package in a clone."""
    package = pathlib.Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def list_recipes() -> list[str]:
    """Names of the recipes that come with the package, sorted.

    >>> "digits" in list_recipes()
    True
    """
    return sorted(path.stem for path in _folder().glob("*.py"))


def recipe_path(text: str) -> str:
    """The file of a recipe, with its arguments.

    >>> pathlib.Path(recipe_path("digits:epochs=3")).name
    'digits.py:epochs=3'

    Args:
        text: the path of a file ("configs/digits.py", "my_recipe.py") or the name of a recipe that
            comes with the package ("digits"); arguments may follow after a colon.

    Raises:
        ValueError: there is no such file or recipe.
    """
    name, colon, arguments = text.partition(":")
    names = list_recipes()
    if name in names:
        return f"{_folder() / name}.py{colon}{arguments}"
    if pathlib.Path(name).is_file():
        return text
    raise ValueError(f"--config={name} is not a recipe; {closest(name, names)}, or a file")


def with_arguments(text: str, **replacements: Any) -> str:
    """A recipe with other arguments.

    >>> with_arguments("digits:epochs=3,position=ape", position="none")
    'digits:epochs=3,position=none'

    Args:
        text: as for `recipe_path`.
        **replacements: arguments that are added or replaced.

    Raises:
        ValueError: the arguments are not of the form key=value.
    """
    recipe, _, arguments = text.partition(":")
    merged = assignments(arguments, "recipe argument") | replacements
    return f"{recipe}:{','.join(f'{key}={value}' for key, value in merged.items())}"


def load_recipe(text: str, changes: Mapping[str, Any] = {}) -> ml_collections.ConfigDict:
    """The settings of a recipe.

    >>> load_recipe("digits:epochs=3", {"optim.b1": 0.8}).epochs
    3.0

    Args:
        text: as for `recipe_path`.
        changes: values in place of the recipe's, by setting.

    Raises:
        ConfigError: there is no such recipe, it has no such argument, or it raises an error.
    """
    with blame("--config"):
        path, *arguments = recipe_path(text).split(":", 1)
    name = f"rope_jax_recipe_{pathlib.Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ConfigError(f"--config={path} is no Python file: its name must end in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config(*arguments)
        with config.ignore_type():
            config.update_from_flattened_dict(changes)
        return config
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        words = f"{type(error).__name__}: {error}"
        if key := re.search(r'Key "(\w+)"', words):  # of ml_collections, which lists all the others
            hint = setting_called(key[1]) or nearest(key[1], settings())
            words = f"{key[1]} is not a setting; {hint}"
        raise ConfigError(f"--config={path}: {words}{find_line(error)}") from error


def read_settings(words: Iterable[str]) -> dict[str, Any]:
    """The settings of a command line.

    >>> read_settings(["--config.epochs=3", "--config.optim.b1", "0.8", "--config.tensorboard"])
    {'epochs': 3.0, 'optim.b1': 0.8, 'tensorboard': True}
    >>> read_settings(["--config.eval.resolutions=6", "--config.eval.resolutions=(8,12)"])
    {'eval.resolutions': (6, 8, 12)}

    Args:
        words: `--config.a.b=value` or two words, `--config.flag` and `--noconfig.flag`. If a
            setting is repeated, tuples are joined; otherwise the last value counts.

    Raises:
        ConfigError: an unexpected word, an unknown setting, or a value that is not allowed.
    """
    values, words = {}, iter(words)
    for word in words:
        flag = re.fullmatch(r"--(no)?config\.([^=]*)(?:=(.*))?", word, re.DOTALL)
        if flag is None:
            name = word.lstrip("-").partition("=")[0]
            hint = setting_called(name) or "settings are written --config.key=value"
            raise ConfigError(f"unexpected argument {word!r}; {hint}")
        negated, name, text = flag.groups()
        kind = setting(name).type
        if negated and (text is not None or kind is not bool):
            raise ConfigError(
                f"unexpected argument {word!r}; settings are written --config.key=value"
            )
        if text is None:
            text = str(not negated) if kind is bool else next(words, "")
        if typing.get_origin(kind) is tuple:
            value = literal(text)
            value = values.get(name, ()) + (value if isinstance(value, tuple) else (value,))
            values[name] = convert_setting(value, name)
        else:
            values[name] = convert_setting(text, name, read)
    return values
