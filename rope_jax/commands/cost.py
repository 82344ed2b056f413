"""Parameters and multiply-adds of a model, per module, as `rope_jax.models.cost` counts them.

    python -m rope_jax.models.cost swin_t --position=rope_mixed --image_size=384 --depth=2
    python -m rope_jax.models.cost deit3_b16 --head=upernet --num_classes=150 --image_size=512

Papers call the multiply-adds FLOPs.
"""

from flax import nnx

from rope_jax.commands.arguments import command_parser
from rope_jax.models.cost import Cost, cost
from rope_jax.models.registry import find_model
from rope_jax.names.text import format_table, image_pair
from rope_jax.weights.create import create_model


def main(arguments: list[str] | None = None) -> None:
    """Prints the table of a model."""
    parser = command_parser("rope_jax.models.cost", __doc__)
    parser.add_argument("name", help="of a model, see rope_jax.list_models()")
    parser.add_argument("--position", help="a positional scheme as written for create_model")
    parser.add_argument("--image_size", help="pixels: 224, or height and width: 224x320")
    parser.add_argument("--num_classes", type=int)
    parser.add_argument("--head", help="of dense prediction, as written for create_model")
    parser.add_argument(
        "--depth",
        type=int,
        default=3,
        help="parts of a module's name: 2 for blocks.0, 3 for blocks.0.attn",
    )
    flags = parser.parse_args(arguments)

    def make() -> nnx.Module:
        return create_model(
            flags.name,
            position=flags.position,
            image_size=size,
            num_classes=flags.num_classes,
            head=flags.head,
        )

    with parser.one_line_errors():
        size = image_pair(flags.image_size or find_model(flags.name).image_size)
        rows = cost(nnx.eval_shape(make), size, depth=flags.depth)
    total = Cost("total", sum(x.parameters for x in rows), sum(x.multiply_adds for x in rows))
    cells = [
        (row.module, f"{row.parameters:,}", f"{row.multiply_adds:,}") for row in [*rows, total]
    ]
    print(format_table(("module", "parameters", "multiply-adds"), cells))
