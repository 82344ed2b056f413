"""The call of an operation, as the public functions make it after checking its arguments, and
`explain`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rope_jax_kernels import dispatch
from rope_jax_kernels.tuning.choices import choose
from rope_jax_kernels.tuning.record import note, split_arrays


def call(
    op: str, arguments: dict[str, Any], *, implementation: str | None, kernels_pay: bool = True
) -> Any:
    """Computes `op` by the named implementation, the measured one, or the preferred one.

    Args:
        op: name of the operation.
        arguments: the operation's arguments by name, without `implementation`.
        implementation: None, or a name in `dispatch.IMPLEMENTATIONS[op]`.
        kernels_pay: see `dispatch.candidates`.

    Raises:
        ValueError: the name is unknown, or the named implementation refuses the call.
    """
    context, data = jax.sharding.get_abstract_mesh(), [*dispatch.select_data(arguments).values()]
    types = [jax.typeof(x).sharding for x in jax.tree.leaves(data)]
    meshes = [x.mesh for x in types if x.mesh.explicit_axes] if context.empty else []
    mesh = meshes[0] if meshes else context
    if mesh.explicit_axes:  # kernels and some reshapes cannot express shardings in types
        is_array = lambda x: isinstance(x, jax.Array | np.ndarray)
        arrays = {x: y for x, y in arguments.items() if all(map(is_array, jax.tree.leaves(y)))}
        return jax.sharding.auto_axes(
            lambda arrays: call(
                op, arguments | arrays, implementation=implementation, kernels_pay=kernels_pay
            ),
            axes=mesh.explicit_axes,
            out_sharding=_shardings(op, [x.spec for x in types], mesh),
        )(arrays)
    if implementation is not None:
        return dispatch.run_named(op, implementation, arguments)
    default = dispatch.resolve(op, arguments, kernels_pay)
    if (watched := note(op, arguments, default)) is not None:
        return dispatch.run_by_platform(op, default, watched)
    choice = choose(op, arguments, default)
    return dispatch.run_by_platform(op, choice.implementation, arguments, choice.tile)


def _shardings(op: str, specs: list[P], mesh: AbstractMesh) -> Any:
    """The shardings of the results of an operation, which are those of its data."""
    if op == "attention_qkv":
        specs = [(*specs[0][:-3], *specs[0][-2:])]
    elif op == "unpack_and_rotate":
        specs = [specs[0][:1]]
    shardings = tuple(NamedSharding(mesh, P(*spec)) for spec in specs)
    return shardings if op == "rotate" else shardings[0]


def explain(op: Callable, *args: Any, **kwargs: Any) -> dict[str, str]:
    """Lists which implementations support the call `op(*args, **kwargs)`, without running it.

    Example:
        >>> import jax.numpy as jnp
        >>> from rope_jax_kernels import Global, attention, explain
        >>> x = jnp.ones((1, 4, 2, 16))
        >>> reasons = explain(attention, x, x, x, pattern=Global())
        >>> sorted(reasons)
        ['cudnn', 'mosaic', 'triton', 'xla']
        >>> reasons["xla"]
        'ok'

    Args:
        op: `rotate`, `rotate_qkv`, `rotate_by_angles`, `attention` or `attention_qkv`.
        *args: positional arguments of `op`.
        **kwargs: keyword arguments of `op`; `implementation` is ignored.

    Returns:
        A map from implementation to "ok", or to its reason for refusing the call.

    Raises:
        ValueError: `op` is not an operation of this package, or the call itself raises it.
        TypeError: an argument that `op` needs is missing, it does not take one of them, or the call
            itself raises it.
    """
    name = getattr(op, "__name__", None)
    if name not in dispatch.IMPLEMENTATIONS or not str(op.__module__).startswith(f"{__package__}."):
        raise ValueError(
            f"op={op!r} is not an operation of rope_jax_kernels; use one of "
            f"{list(dispatch.IMPLEMENTATIONS)}"
        )
    signature = inspect.signature(op)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"explain({name}, ...): {error}; it takes {name}{signature}") from None
    bound.apply_defaults()
    arguments = {x: y for x, y in bound.arguments.items() if x != "implementation"}
    arrays, put = split_arrays(arguments)
    shapes = {name: x for name, x in arrays.items() if isinstance(x, jax.ShapeDtypeStruct)}
    # Raises what the call would raise.
    jax.eval_shape(lambda shapes: op(**put(shapes), implementation="xla"), shapes)
    return {
        implementation: dispatch.refusal(name, implementation, arguments) or "ok"
        for implementation in dispatch.IMPLEMENTATIONS[name]
    }
