"""The command `python -m rope_jax.evaluate`, see `rope_jax.evaluate.command`."""

from rope_jax.commands.evaluate import main

main()
