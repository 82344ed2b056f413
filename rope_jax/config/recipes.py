"""Recipes by name: those of `configs/`, which come with the package."""

import importlib.util
import pathlib
from typing import Any

import ml_collections

from rope_jax.config.resolve import blame
from rope_jax.names.notation import assignments
from rope_jax.names.text import closest


def _folder() -> pathlib.Path:
    """The folder of the recipes: inside an installed package, beside it in a clone."""
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
    known = list_recipes()
    if name in known:
        return f"{_folder() / name}.py{colon}{arguments}"
    if pathlib.Path(name).is_file():
        return text
    raise ValueError(f"--config={name} is not a recipe; {closest(name, known)}, or a file")


def with_arguments(text: str, **given: Any) -> str:
    """A recipe with other arguments.

    >>> with_arguments("digits:epochs=3,position=ape", position="none")
    'digits:epochs=3,position=none'

    Args:
        text: as for `recipe_path`.
        **given: arguments that are added or replaced.

    Raises:
        ValueError: the arguments are not of the form key=value.
    """
    recipe, _, arguments = text.partition(":")
    found = assignments(arguments, "recipe argument") | given
    return f"{recipe}:{','.join(f'{key}={value}' for key, value in found.items())}"


def load_recipe(text: str) -> ml_collections.ConfigDict:
    """The settings of a recipe.

    >>> load_recipe("digits:epochs=3").epochs
    3.0

    Args:
        text: as for `recipe_path`.

    Raises:
        ConfigError: there is no such recipe, or it has no such argument.
    """
    with blame("--config"):
        path, _, arguments = recipe_path(text).partition(":")
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(arguments)
