"""How one public function stands in front of several implementations.

Every operation of this package has a reference in plain jax.numpy, called "xla", which never refuses, and may have kernels beside
it. A kernel says in one sentence why it cannot serve a call, or None when it can; nothing else decides who is asked.
"""

import dataclasses
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation of an operation.

    Attributes:
        run: computes the operation; takes the operation's arguments without `implementation`.
        refuses: takes the same arguments and returns why this backend cannot serve them, or None.
    """

    run: Callable
    refuses: Callable[..., str | None] = lambda *args, **kwargs: None


def choose(op: str, backends: Mapping[str, Backend], implementation: str | None, args: tuple, kwargs: dict) -> Callable:
    """Returns the function that serves this call: the named backend, or the first of `backends` that does not refuse.

    Raises:
        ValueError: the name is unknown, or the named backend refuses.
    """
    if implementation is None:
        return next(b.run for b in backends.values() if b.refuses(*args, **kwargs) is None)
    if implementation not in backends:
        raise ValueError(f"implementation={implementation!r} is not one that {op} has; use None or one of {sorted(backends)}")
    reason = backends[implementation].refuses(*args, **kwargs)
    if reason is not None:
        raise ValueError(f"implementation={implementation!r} cannot serve this call of {op}: {reason}; use None or 'xla'")
    return backends[implementation].run


def reasons(backends: Mapping[str, Backend], args: tuple, kwargs: dict) -> dict[str, str]:
    """What each backend says of a call: "ok", or why it refuses."""
    return {name: backend.refuses(*args, **kwargs) or "ok" for name, backend in backends.items()}
