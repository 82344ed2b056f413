"""What a model costs: parameters and multiply-adds per module.

    python -m rope_jax.models.cost swin_t --position=rope_mixed --image_size=384 --depth=2

Multiply-adds are those of dense layers, convolutions and the two products of attention, for one image: what papers call FLOPs. Norms,
activations, rotations and what is added are left out; so are tokens that a kernel computes and masks, except the padding of windows, and
those that NAT's `pad_compat` appends.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator

from flax import nnx

from rope_jax.models.pretrained.rows import has_stages
from rope_jax.models.registry import create_model, find_model, image_pair
from rope_jax.positions.grids import Grid
from rope_jax_kernels import Global, Neighborhood
from rope_jax_kernels.attention.patterns import Pattern


@dataclasses.dataclass(frozen=True)
class Cost:
    """Parameters of a module and its multiply-adds for one image."""

    module: str
    parameters: int
    multiply_adds: int


def cost(model: nnx.Module, image_size: int | Grid, *, depth: int | None = None) -> list[Cost]:
    """Counts a model's modules, in the order of their names.

    Args:
        model: from `create_model`, or its shapes: `nnx.eval_shape(lambda: create_model(name))`.
        image_size: pixels, int or (height, width), of the image that goes through.
        depth: how many parts a module's name has at most, for example 2 for "blocks.0"; what lies deeper is added up. None for all.

    Returns:
        One entry for each module. Their parameters add up to all trainable ones of the model.
    """
    places, products = _places(model, image_pair(image_size)), _products(model, image_pair(image_size))
    found: dict[str, tuple[int, int]] = {}

    def add(module: str, parameters: int, multiply_adds: int) -> None:
        name = ".".join(module.split(".")[:depth])
        one, other = found.get(name, (0, 0))
        found[name] = (one + parameters, other + multiply_adds)

    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        module, parameter = ".".join(map(str, path[:-1])), path[-1]
        size = math.prod(variable.shape)
        times = next((n for name, n in places.items() if f"{module}.".startswith(f"{name}.")), 0) if parameter == "kernel" else 0
        add(module or str(parameter), size, size * times)
    for module, multiply_adds in products.items():
        add(module, 0, multiply_adds)
    return [Cost(module, *numbers) for module, numbers in found.items()]


def attended_pairs(pattern: Pattern, grid: Grid, prefix: int = 0) -> int:
    """How many pairs of query and key a layer of attention compares on a map, padding of windows included."""
    if isinstance(pattern, Global):
        return (prefix + grid[0] * grid[1]) ** 2
    if isinstance(pattern, Neighborhood):
        axes = zip(grid, pattern.size, pattern.dilation, strict=True)
        return math.prod(sum(min(kernel, -(-(n - i % step) // step)) for i in range(n)) for n, kernel, step in axes)
    return math.prod(-(-n // size) * size * size for n, size in zip(grid, pattern.fit(grid).size, strict=True))


def _places(model: nnx.Module, image_size: Grid) -> dict[str, int]:
    """For the names of modules, at how many places of an image their weights are applied; the first name that begins a module's counts."""
    if not has_stages(model):
        area = math.prod(model.grids(image_size)[0])
        own = model.places(image_size) if hasattr(model, "places") else {}
        return own | {"patch_embed": area, "blocks": _prefix(model) + area, "head": 1}
    areas = [math.prod(grid) for grid in model.grids(image_size)]
    # NAT's stem: its first convolution sees every second pixel, its second one every fourth.
    places = {"patch_embed.proj.0": math.prod(-(-n // 2) for n in image_size), "patch_embed": areas[0], "head": 1}
    for index, area in enumerate(areas):
        places |= {f"stages.{index}.blocks": area, f"stages.{index}.downsample": areas[min(index + 1, len(areas) - 1)]}
    return places


def _products(model: nnx.Module, image_size: Grid) -> dict[str, int]:
    """Multiply-adds of queries with keys and of weights with values, by the name of the attention layer."""
    found = {f"{name}.attn": 2 * attended_pairs(*where) * channels for name, channels, *where in _layers(model, image_size)}
    return found | (model.products(image_size) if hasattr(model, "products") else {})


def _layers(model: nnx.Module, image_size: Grid) -> Iterator[tuple[str, int, Pattern, Grid, int]]:
    if not has_stages(model):
        for index in range(model.options.depth):
            yield f"blocks.{index}", model.options.width, model.pattern, model.grids(image_size)[0], _prefix(model)
        return
    for stage, grid in enumerate(model.grids(image_size)):
        for index, pattern in enumerate(model.patterns(stage, grid)):
            yield f"stages.{stage}.blocks.{index}", model.options.width << stage, pattern, grid, 0


def _prefix(model: nnx.Module) -> int:
    return model.position.stage.prefix


def _size(text: str) -> int | Grid:
    numbers = text.split("x")
    if len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"--image_size={text} must be pixels, 224, or height and width, 224x320")
    return int(text) if len(numbers) == 1 else (int(numbers[0]), int(numbers[1]))


def main(arguments: list[str] | None = None) -> None:
    """Prints the table of a model."""
    parser = argparse.ArgumentParser(prog="python -m rope_jax.models.cost", description=__doc__.split("\n")[0])
    parser.add_argument("name", help="of a model, see rope_jax.list_models()")
    parser.add_argument("--position", help="a positional scheme as written for create_model")
    parser.add_argument("--image_size", help="pixels: 224, or height and width: 224x320")
    parser.add_argument("--num_classes", type=int)
    parser.add_argument("--depth", type=int, default=3, help="parts of a module's name: 2 for blocks.0, 3 for blocks.0.attn")
    asked = parser.parse_args(arguments)
    try:
        size = find_model(asked.name).image_size if asked.image_size is None else _size(asked.image_size)
        make = lambda: create_model(asked.name, position=asked.position, num_classes=asked.num_classes, image_size=size)
        rows = cost(nnx.eval_shape(make), size, depth=asked.depth)
    except ValueError as error:
        parser.error(str(error))
    rows.append(Cost("total", sum(row.parameters for row in rows), sum(row.multiply_adds for row in rows)))
    width = max(len(row.module) for row in rows)
    print(f"{'module':{width}}  {'parameters':>13}  {'multiply-adds':>17}")
    for row in rows:
        print(f"{row.module:{width}}  {row.parameters:13,}  {row.multiply_adds:17,}")


if __name__ == "__main__":
    main()
