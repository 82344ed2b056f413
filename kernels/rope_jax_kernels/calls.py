"""Calls noted while programs are traced, for `tune` to measure."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from rope_jax_kernels.rotation import Rotation

RECORDER = jax.make_user_context(None)


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
        return key_of(self.op, self.arguments)

    @property
    def direction(self) -> str:
        """What is measured: "forward" for its value alone, or "training" for its gradients, too."""
        return "training" if self.gradients else "forward"


def key_of(op: str, arguments: dict[str, Any]) -> str:
    """A call in one line: its operation, shapes, dtypes and static arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> from rope_jax_kernels import Global
        >>> from rope_jax_kernels.calls import key_of
        >>> key_of("attention", {"q": jnp.ones((2, 5, 3, 16)), "pattern": Global(), "bias": None})
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


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays among a call's arguments, apart from its static ones.

    Attributes:
        names: of the arrays: "qkv", "rotation.freqs".
        values: the arrays.
        put: arrays -> the arguments with these arrays.
    """

    names: tuple[str, ...]
    values: tuple
    put: Callable[[Sequence[Any]], dict[str, Any]]


def arrays_of(arguments: dict[str, Any]) -> Arrays:
    """Takes the arrays out of a call's arguments."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(arguments)
    at = [i for i, (_, leaf) in enumerate(leaves) if _is_array(leaf)]
    names = [jax.tree_util.keystr(leaves[i][0], simple=True, separator=".") for i in at]

    def put(values: Sequence[Any]) -> dict[str, Any]:
        everything = [leaf for _, leaf in leaves]
        for i, value in zip(at, values, strict=True):
            everything[i] = value
        return {name: tree.unflatten(everything)[name] for name in arguments}

    return Arrays(tuple(names), tuple(leaves[i][1] for i in at), put)


class Recorder:
    """Notes calls in a list; hashable by identity, as a context of jax must be."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def note(self, op: str, arguments: dict[str, Any], default: str) -> dict[str, Any]:
        """Notes a call; returns its arguments, watched for their gradients."""
        arrays = arrays_of(arguments)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays.values]
        new = Call(op, arrays.put(shapes), default)
        call = next((x for x in self.calls if x.key == new.key), new)
        if call is new:
            self.calls.append(new)
        call.count += 1
        return arrays.put(
            [
                _watched(x, name, call.gradients)
                for name, x in zip(arrays.names, arrays.values, strict=True)
            ]
        )


def _watched(x: Array, name: str, wanted: set[str]) -> Array:
    """The array itself, with a rule that adds its name to a set where its gradient is taken."""

    @jax.custom_vjp
    def unchanged(x: Array) -> Array:
        return x

    def forward(x: Any) -> tuple[Array, None]:
        if x.perturbed:
            wanted.add(name)
        return x.value, None

    def backward(_: None, gradient: Any) -> tuple:
        return (None if isinstance(gradient, SymbolicZero) else gradient,)

    unchanged.defvjp(forward, backward, symbolic_zeros=True)
    return unchanged(x)


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
    recorder = Recorder()
    with RECORDER(recorder):
        yield recorder.calls
