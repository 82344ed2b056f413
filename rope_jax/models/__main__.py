"""`python -m rope_jax.models`: see `rope_jax.commands.models`."""

from rope_jax.commands.models import main

if __name__ == "__main__":
    main()
