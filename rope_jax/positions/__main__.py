"""Prints every positional scheme: where it comes from, what it does, and what it costs a model.

python -m rope_jax.positions --model=deit3_s16
"""

import argparse
import math

from flax import nnx

from rope_jax.models import create_model
from rope_jax.models.registry import find_model
from rope_jax.positions.table import HEADER, markdown, plain, rows


def parameters(model: str, position: str) -> str:
    """How many trainable numbers a scheme has in a model, or "refused" where the two do not go together."""
    try:
        made = nnx.eval_shape(lambda: create_model(model, position=position))
    except ValueError:
        return "refused"
    params = nnx.to_flat_state(nnx.state(made, nnx.Param))
    return f"{sum(math.prod(param.shape) for path, param in params if 'position' in path):,}"


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m rope_jax.positions", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="count the scheme's parameters in this model, see rope_jax.list_models()")
    parser.add_argument("--markdown", action="store_true", help="print the table of the README")
    asked = parser.parse_args(arguments)
    if asked.markdown:
        print(markdown(), end="")
    elif asked.model is None:
        print(plain(HEADER, rows()), end="")
    else:
        try:
            find_model(asked.model)
        except ValueError as error:
            parser.error(str(error))
        header = (*HEADER, f"parameters in {asked.model}")
        print(plain(header, rows(lambda position: parameters(asked.model, position))), end="")


if __name__ == "__main__":
    main()
