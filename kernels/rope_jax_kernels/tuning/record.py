"""Calls noted while programs are traced, for `tune` to measure."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from rope_jax_kernels import device
from rope_jax_kernels.rotation import Rotation

_CALLS = jax.make_user_context(None)  # the list of `record` that is in force


@dataclasses.dataclass(eq=False)
class Call:
    """A distinct call that was traced, as `record` notes it.

    Example:
        >>> import jax.numpy as jnp
        >>> from rope_jax_kernels import Global, attention, record
        >>> q = jnp.ones((1, 4, 2, 16))
        >>> with record() as calls:
        ...     _ = jax.eval_shape(lambda q: attention(q, q, q, pattern=Global()), q)
        >>> [(call.op, call.count, call.direction) for call in calls]
        [('attention', 1, 'forward')]

    Attributes:
        op: name of the operation.
        arguments: its arguments by name, with shapes in place of arrays.
        default: the implementation that it uses without a measurement.
        count: how often it was traced.
        gradients: names of the arrays whose gradients were taken.
    """

    op: str
    arguments: dict[str, Any]
    default: str
    count: int = 0
    gradients: set[str] = dataclasses.field(default_factory=set)

    @property
    def key(self) -> str:
        """The call in one line, the same in every process."""
        return call_key(self.op, self.arguments)

    @property
    def direction(self) -> str:
        """ "forward" if the value alone is measured, "training" if its gradients are, too."""
        return "training" if self.gradients else "forward"


def call_key(op: str, arguments: dict[str, Any]) -> str:
    """A call in one line: its operation, shapes, dtypes and static arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> from rope_jax_kernels import Global
        >>> from rope_jax_kernels.tuning.record import call_key
        >>> call_key("attention", {"q": jnp.ones((2, 5, 3, 16)), "pattern": Global(), "bias": None})
        'attention q=float32[2,5,3,16] pattern=Global()'
    """
    words = [f"{name}={_text(value)}" for name, value in arguments.items() if value is not None]
    return " ".join([op, *words])


def _text(value: Any) -> str:
    if isinstance(value, Rotation):
        return f"{value.pairing}({_text(value.coords)},{_text(value.freqs)})"
    if _is_array(value):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return "number" if isinstance(value, int | float | np.number) else str(value)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def split_arrays(
    arguments: dict[str, Any],
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Splits the arrays of a call's arguments from its static ones.

    Returns:
        The arrays by name ("qkv", "rotation.freqs"), and a function that returns the arguments with
        others in their places, by name.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(arguments)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    named = {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}

    def put(arrays: dict[str, Any]) -> dict[str, Any]:
        changed = tree.unflatten((named | arrays).values())
        return {name: changed[name] for name in arguments}

    return {name: leaf for name, leaf in named.items() if _is_array(leaf)}, put


class _Calls(list):
    """A list of calls, hashable by identity, as a context of jax must be."""

    __hash__ = object.__hash__


def note(op: str, arguments: dict[str, Any], default: str) -> dict[str, Any] | None:
    """Notes a call; returns its arguments, watched for their gradients.

    Without `record`, and for a call that XLA may partition, notes nothing and returns None.
    """
    calls = _CALLS.value
    if calls is None or device.may_be_partitioned():
        return None
    arrays, put = split_arrays(arguments)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    new = Call(op, put(shapes), default)
    call = next((x for x in calls if x.key == new.key), new)
    if call is new:
        calls.append(new)
    call.count += 1
    return put({name: _watch(x, name, call.gradients) for name, x in arrays.items()})


def _watch(x: Array, name: str, gradients: set[str]) -> Array:
    """Wraps an array so that its name is added to a set where its gradient is taken."""

    @jax.custom_vjp
    def identity(x: Array) -> Array:
        return x

    def forward(x: Any) -> tuple[Array, None]:
        if x.perturbed:
            gradients.add(name)
        return x.value, None

    def backward(_: None, gradient: Any) -> tuple:
        return (None if isinstance(gradient, SymbolicZero) else gradient,)

    identity.defvjp(forward, backward, symbolic_zeros=True)
    return identity(x)


@contextlib.contextmanager
def record() -> Iterator[list[Call]]:
    """Notes the calls with `implementation=None` of the programs that are traced inside.

    Distinct calls are noted once, with a count, and with the gradients that are taken. Calls that
    XLA may have to partition over devices are left out; inside `jax.shard_map` they are noted
    as each device makes them, and inside `jax.vmap` without the axis that is mapped.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from rope_jax_kernels import Global, attention, record
        >>> x = jax.ShapeDtypeStruct((2, 5, 3, 16), jnp.float32)
        >>> loss = lambda x: attention(x, x, x, pattern=Global()).sum()
        >>> with record() as calls:
        ...     gradient = jax.eval_shape(jax.grad(loss), x)
        >>> [(call.op, call.direction, sorted(call.gradients)) for call in calls]
        [('attention', 'training', ['k', 'q', 'v'])]

    Yields:
        A list that grows while programs are traced. Tracing with shapes (`jax.eval_shape`) is
        enough.
    """
    calls = _Calls()
    with _CALLS(calls):
        yield calls
