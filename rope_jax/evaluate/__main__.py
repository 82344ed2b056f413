"""`python -m rope_jax.evaluate`: see `rope_jax.commands.evaluate`."""

from rope_jax.commands.evaluate import main

if __name__ == "__main__":
    main()
