"""Calls noted while programs are traced, for `tune` to measure."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from rope_jax_kernels.rotation import Rotation

FORWARD = "forward"
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
        >>> [(call.op, call.count, call.directions) for call in calls]
        [('attention', 1, {'forward': 1})]

    Attributes:
        op: name of the operation.
        arguments: its arguments by name, with shapes in place of arrays.
        default: the implementation that it uses without a measurement.
        traced: for each time that it was traced, the arrays whose gradients were taken then.
    """

    op: str
    arguments: dict[str, Any]
    default: str
    traced: list[set[str]] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> str:
        """The call in one line, the same in every process."""
        return key_of(self.op, self.arguments)

    @property
    def count(self) -> int:
        """How often it was traced."""
        return len(self.traced)

    @property
    def directions(self) -> dict[str, int]:
        """Directions (see `direction`) in which it was traced, and how often in each."""
        return dict(collections.Counter(map(direction, self.traced)))


def direction(wanted: Iterable[str]) -> str:
    """The name of a direction: "forward", or "gradient of qkv, rotation.freqs"."""
    return f"gradient of {', '.join(sorted(wanted))}" if wanted else FORWARD


def wanted_of(name: str) -> list[str]:
    """The inverse of `direction`.

    >>> wanted_of(direction(["qkv", "bias"])), wanted_of(direction([]))
    (['bias', 'qkv'], [])
    """
    return [] if name == FORWARD else name.removeprefix("gradient of ").split(", ")


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
        self._by_key: dict[str, Call] = {}

    def note(self, op: str, arguments: dict[str, Any], default: str) -> dict[str, Any]:
        """Notes a call; returns its arguments, watched for their gradients."""
        arrays = arrays_of(arguments)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays.values]
        call = Call(op, arrays.put(shapes), default)
        if call.key not in self._by_key:
            self._by_key[call.key] = call
            self.calls.append(call)
        wanted = set()
        self._by_key[call.key].traced.append(wanted)
        watched = [
            _watched(x, name, wanted) for name, x in zip(arrays.names, arrays.values, strict=True)
        ]
        return arrays.put(watched)


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
        >>> [(call.op, call.directions) for call in calls]
        [('attention', {'gradient of k, q, v': 1})]

    Yields:
        A list that grows while programs are traced. Tracing with shapes (`jax.eval_shape`) is
        enough.
    """
    recorder = Recorder()
    with RECORDER(recorder):
        yield recorder.calls
