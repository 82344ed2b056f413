"""`python -m rope_jax.analysis.report`: see `rope_jax.commands.report`."""

from rope_jax.commands.report import main

if __name__ == "__main__":
    main()
