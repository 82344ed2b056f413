"""Parameters and multiply-adds of a model, per module.

    python -m rope_jax.models.cost swin_t --position=rope_mixed --image_size=384 --depth=2
    python -m rope_jax.models.cost deit3_b16 --head=upernet --num_classes=150 --image_size=512

Multiply-adds are those of linear layers, convolutions and the two products of attention, for one
image: papers call them FLOPs. Norms, activations, rotations, additions, pooling and the resizing of
maps are not counted, nor are tokens that a kernel computes and masks, except the padding of windows
and that of NAT's `pad_compat`. With a head of dense prediction its auxiliary head is counted, too,
which acts in training only.
"""

import argparse
import dataclasses
import math

from flax import nnx

from rope_jax.models.create import create_model
from rope_jax.models.registry import find_model
from rope_jax.positions.grids import Grid
from rope_jax.text import format_table, image_pair
from rope_jax_kernels import Global, Neighborhood, Pattern


@dataclasses.dataclass(frozen=True)
class Cost:
    """Parameters of a module and its multiply-adds for one image."""

    module: str
    parameters: int
    multiply_adds: int


def cost(model: nnx.Module, image_size: int | Grid, *, depth: int | None = None) -> list[Cost]:
    """Counts parameters and multiply-adds of a model's modules, in the order of their names.

    Args:
        model: from `create_model`, or its shapes: `nnx.eval_shape(lambda: create_model(name))`.
        image_size: of the image in pixels, a side or (height, width).
        depth: parts of a module's name, for example 2 for "blocks.0"; deeper modules are summed.
            None for all.

    Returns:
        One entry per module. Their parameters add up to all trainable ones of the model.
    """
    image_size = image_pair(image_size)
    places = model.places(image_size)
    parameters: dict[str, int] = {}
    multiply_adds: dict[str, int] = {}

    def add(counts: dict[str, int], module: str, count: int) -> None:
        name = ".".join(module.split(".")[:depth])
        counts[name] = counts.get(name, 0) + count

    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        module, size = ".".join(map(str, path[:-1])), math.prod(variable.shape)
        fitting = [n for prefix, n in places.items() if f"{module}.".startswith(f"{prefix}.")]
        times = fitting[0] if fitting and path[-1] == "kernel" else 0
        add(parameters, module or str(path[-1]), size)
        add(multiply_adds, module or str(path[-1]), size * times)
    for module, count in (_attention(model, image_size) | model.products(image_size)).items():
        add(multiply_adds, module, count)
    return [Cost(name, parameters.get(name, 0), n) for name, n in multiply_adds.items()]


def _attention(model: nnx.Module, image_size: Grid) -> dict[str, int]:
    """Multiply-adds of queries with keys and of weights with values, by attention layer."""
    found = {}
    grids = model.grids(image_size)
    for index, (prefix, part) in enumerate(model.parts().items()):
        stage = part.position.stage
        for layer, pattern in enumerate(model.patterns(index, grids[index])):
            pairs = attended_pairs(pattern, grids[index], stage.prefix)
            found[f"{prefix}blocks.{layer}.attn"] = 2 * pairs * stage.channels
    return found


def attended_pairs(pattern: Pattern, grid: Grid, prefix: int = 0) -> int:
    """Pairs of query and key in one attention layer on a map, with the padding of windows.

    Args:
        pattern: attention pattern.
        grid: (H, W).
        prefix: number of class and register tokens.
    """
    if isinstance(pattern, Global):
        return (prefix + grid[0] * grid[1]) ** 2
    pairs = 1
    if isinstance(pattern, Neighborhood):
        for n, kernel, step in zip(grid, pattern.size, pattern.dilation, strict=True):
            pairs *= sum(min(kernel, -(-(n - i % step) // step)) for i in range(n))
    else:
        for n, size in zip(grid, pattern.fit(grid).size, strict=True):
            pairs *= -(-n // size) * size * size
    return pairs


def main(arguments: list[str] | None = None) -> None:
    """Prints the table of a model."""
    parser = argparse.ArgumentParser(
        prog="python -m rope_jax.models.cost", description=__doc__.split("\n")[0]
    )
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
        options = {"position": flags.position, "num_classes": flags.num_classes}
        return create_model(flags.name, image_size=size, head=flags.head, **options)

    try:
        size = image_pair(flags.image_size or find_model(flags.name).image_size)
        rows = cost(nnx.eval_shape(make), size, depth=flags.depth)
    except ValueError as error:
        parser.error(str(error))
    parameters, multiply_adds = (
        sum(getattr(row, field) for row in rows) for field in ("parameters", "multiply_adds")
    )
    rows.append(Cost("total", parameters, multiply_adds))
    cells = [(row.module, f"{row.parameters:,}", f"{row.multiply_adds:,}") for row in rows]
    print(format_table(("module", "parameters", "multiply-adds"), cells))


if __name__ == "__main__":
    main()
