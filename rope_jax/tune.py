"""`python -m rope_jax.tune`: see `rope_jax.commands.tune`."""

from rope_jax.commands.tune import main

if __name__ == "__main__":
    main()
