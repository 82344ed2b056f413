"""`python -m rope_jax.data.prepare`: see `rope_jax.commands.prepare`."""

from rope_jax.commands.prepare import main

if __name__ == "__main__":
    main()
