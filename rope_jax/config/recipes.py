"""Recipes by name: those of `configs/`, which come with the package."""

import pathlib

from rope_jax.text import closest


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
    if "/" in name or name.endswith(".py"):
        raise ValueError(
            f"--config={name} does not exist; recipes that come with rope_jax go by name: "
            f"{', '.join(known)}"
        )
    raise ValueError(f"--config={name} is not a recipe; {closest(name, known)}")
