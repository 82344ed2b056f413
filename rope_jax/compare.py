"""`python -m rope_jax.compare`: see `rope_jax.commands.compare`."""

from rope_jax.commands.compare import command

if __name__ == "__main__":
    command()
