"""Prints every setting: `python -m rope_jax.config`, or `--config.help` of a run's command."""

from rope_jax.config import settings_help
from rope_jax.system.streams import keep_going_unread

keep_going_unread()
print(settings_help())
