"""`python -m rope_jax.models.cost`: see `rope_jax.commands.cost`."""

from rope_jax.commands.cost import main

if __name__ == "__main__":
    main()
