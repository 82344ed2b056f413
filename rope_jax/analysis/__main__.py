"""`python -m rope_jax.analysis`: see `rope_jax.commands.analyse`."""

from rope_jax.commands.analyse import main

if __name__ == "__main__":
    main()
