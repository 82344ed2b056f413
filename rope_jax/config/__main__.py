"""Prints every setting: `python -m rope_jax.config`, or `--config.help` of a run's command."""

from rope_jax.config import settings_help

print(settings_help())
