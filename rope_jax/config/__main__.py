"""Prints every setting: `python -m rope_jax.config`."""

from rope_jax.config import settings_table

print(settings_table())
