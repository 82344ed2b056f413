"""`python -m rope_jax.main`: see `rope_jax.commands.train`."""

from rope_jax.commands.train import command

if __name__ == "__main__":
    command()
