"""`python -m rope_jax.positions`: see `rope_jax.commands.positions`."""

from rope_jax.commands.positions import main

if __name__ == "__main__":
    main()
