"""Parameters and multiply-adds of a model, per module.

Multiply-adds are those of linear layers, convolutions and products of activations, such as the two
of attention, in the model's program for one image: papers call them FLOPs. Norms, activations,
additions, pooling, the resizing of maps and the computations of a positional scheme are not
counted, nor are pairs of tokens that attention computes and masks, except the padding of windows
and that of NAT's `pad_compat`. The auxiliary head of a head of dense prediction is counted, too,
although it acts in training only.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core
from jaxtyping import Array

from rope_jax.models.attention import ATTENTION_PRODUCT
from rope_jax.models.layers import SUM_OF_PRODUCTS
from rope_jax.names.text import image_pair
from rope_jax.positions.grids import Grid


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
    parameters: dict[str, int] = {}
    multiply_adds: dict[str, int] = {}

    def add(counts: dict[str, int], module: tuple, count: int) -> None:
        name = ".".join(map(str, module[:depth])) or "model"
        counts[name] = counts.get(name, 0) + count

    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        add(parameters, path[:-1] or path, math.prod(variable.shape))
    graph, state = nnx.split(model)
    paths, leaves = zip(*nnx.to_flat_state(state), strict=True)
    images = jax.ShapeDtypeStruct((1, *image_pair(image_size), 3), jnp.float32)

    def run(leaves: Sequence[nnx.Variable], images: Array) -> object:
        merged = nnx.merge(graph, nnx.from_flat_state(zip(paths, leaves, strict=True)))
        return getattr(merged, "predict", merged)(images)

    # With a CPU as default device, every part of the model uses its "xla" form.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        program = jax.make_jaxpr(run)(leaves, images).jaxpr
    origins = [*(_Origin(path) for path in paths), _Origin((), of_image=True)]
    _count(program, origins, "", lambda module, count: add(multiply_adds, module, count))
    names = parameters | multiply_adds
    return [Cost(name, parameters.get(name, 0), multiply_adds.get(name, 0)) for name in names]


@dataclasses.dataclass(frozen=True)
class _Origin:
    """The origin of a value of a program; None for constants.

    Attributes:
        path: of a variable of the model; or of the module to which products of this activation with
            others belong.
        of_image: whether it depends on the image, or is the output of a layer.
    """

    path: tuple
    of_image: bool = False


def _first(origins: Sequence[_Origin | None]) -> _Origin | None:
    """The origin of a value computed from others: of activations before kernels and others."""
    order = lambda x: (x.of_image, x.path[-1:] == ("kernel",), len(x.path))
    return max((x for x in origins if x is not None), key=order, default=None)


def _count(
    jaxpr: core.Jaxpr,
    origins: Sequence[_Origin | None],
    scope: str,
    add: Callable[[tuple, int], None],
) -> list[_Origin | None]:
    """Counts the multiply-adds of a program, and returns the origins of its outputs.

    Args:
        jaxpr: the program.
        origins: of its inputs.
        scope: the names of the scopes in which it is called.
        add: is called with a module's path and a number of multiply-adds.
    """
    by_variable = dict(zip(jaxpr.invars, origins, strict=True))
    find_origin = lambda x: None if isinstance(x, core.Literal) else by_variable.get(x)
    for equation in jaxpr.eqns:
        operands = [find_origin(x) for x in equation.invars]
        inner_scope = f"{scope}/{equation.source_info.name_stack}"
        inner = [*core.jaxprs_in_params(equation.params)]
        if inner and not equation.primitive.name.startswith("scatter"):
            body = inner[-1]  # of branches, the last one
            inputs, times = operands[-len(body.invars) :], equation.params.get("length", 1)
            repeat = lambda module, count, times=times: add(module, count * times)
            outputs = _count(body, inputs, inner_scope, repeat)
        else:
            output = _first(operands)
            if count := _multiply_adds(equation, inner_scope):
                weight = _first([x for x in operands if x is not None and not x.of_image])
                if weight is None and None not in operands:
                    add(_common_path(*operands), count)
                elif weight is not None and "position" not in weight.path:
                    module = weight.path[:-1]
                    add(module, count)
                    parent = module[:-1] if weight.path[-1] == "kernel" else module
                    output = _Origin(parent, of_image=True)
            outputs = [output] * len(equation.outvars)
        by_variable |= dict(zip(equation.outvars, outputs, strict=True))
    return [find_origin(x) for x in jaxpr.outvars]


def _common_path(first: _Origin, second: _Origin) -> tuple:
    """The path of the innermost module that both values come from."""
    pairs = zip(first.path, second.path, strict=False)
    return tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _multiply_adds(equation: core.JaxprEqn, scope: str) -> int:
    """Multiply-adds of one equation, 0 for all but products."""
    params, out = equation.params, equation.outvars[0].aval.size
    match equation.primitive.name:
        case "mul" if SUM_OF_PRODUCTS in scope:
            return out
        case "dot_general" if stated := re.search(rf"{ATTENTION_PRODUCT}(\d+)", scope):
            return int(stated[1])
        case "dot_general":
            (_, contracted), _ = params["dimension_numbers"]
            shape = equation.invars[1].aval.shape
            return out * math.prod(shape[axis] for axis in contracted)
        case "conv_general_dilated":
            kernel = equation.invars[1].aval
            return out * kernel.size // kernel.shape[params["dimension_numbers"].rhs_spec[0]]
    return 0
