"""The settings of a run: the defaults of the recipes in `configs/`, and all checks."""

from rope_jax.config.recipes import (
    list_recipes,
    load_recipe,
    read_settings,
    recipe_path,
    with_arguments,
)
from rope_jax.config.resolve import (
    ConfigError,
    blame,
    default,
    differences,
    in_one_line,
    model_overrides,
    recipe_arguments,
    recipe_sides,
    resolve,
    resolve_stored,
    setting_called,
    settings,
    settings_help,
    to_json,
    with_options,
)
from rope_jax.config.settings import (
    IMAGENET,
    Config,
    OptimConfig,
    Size,
)

__all__ = [
    "IMAGENET",
    "Config",
    "ConfigError",
    "OptimConfig",
    "Size",
    "blame",
    "default",
    "differences",
    "in_one_line",
    "list_recipes",
    "load_recipe",
    "model_overrides",
    "read_settings",
    "recipe_arguments",
    "recipe_path",
    "recipe_sides",
    "resolve",
    "resolve_stored",
    "setting_called",
    "settings",
    "settings_help",
    "to_json",
    "with_arguments",
    "with_options",
]
