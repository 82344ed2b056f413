"""`python -m rope_jax.data.verify`: see `rope_jax.commands.verify`."""

import sys

from rope_jax.commands.verify import main

if __name__ == "__main__":
    sys.exit(main())
