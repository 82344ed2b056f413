"""`python -m rope_jax.export_model`: see `rope_jax.commands.export`."""

from rope_jax.commands.export import main

if __name__ == "__main__":
    main()
