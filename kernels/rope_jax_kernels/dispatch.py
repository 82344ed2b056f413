"""Selection of the implementation of a call.

Every operation has an implementation in plain jax.numpy, "xla", which supports every call. The
others are GPU kernels that refuse unsupported calls with a reason. A call with
`implementation=None` tries the kernels of `PREFERENCE` in order and falls back to "xla".

An implementation is a module with a function for each of its operations, called with the
operation's arguments by name, and (except "xla") `refusal`, which takes the same arguments and
returns a sentence or None. Modules are imported when a call first needs them, so programs on a CPU
import no Pallas.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import jax

from rope_jax_kernels import choices, device

_ROTARY = {"xla": "rotary.reference", "triton": "rotary.triton", "mosaic": "rotary.mosaic"}
_ATTENTION = {
    "xla": "attention.reference",
    "triton": "attention.triton",
    "mosaic": "attention.mosaic",
    "cudnn": "attention.cudnn",
}
_UNPACK = {"xla": "rotary.reference", "triton": "rotary.unpack"}

# Operation -> implementation -> its module in this package.
IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "rotate": _ROTARY,
    "rotate_qkv": _ROTARY,
    "rotate_by_angles": _ROTARY,
    "unpack_and_rotate": _UNPACK,
    "rotate_back_and_pack": _UNPACK,
    "attention": _ATTENTION,
    "attention_qkv": _ATTENTION,
}

# Kind of device -> operation -> kernels that `implementation=None` tries, best first. Without an
# entry it uses "xla". Decided by counting bytes and launches, not by measurements:
# - attention: the kernels move q, k, v and the output once. XLA also writes logits, rolled maps,
#   windows and halos of keys; cuDNN needs q, k and v as separate arrays.
# - rotate, rotate_by_angles: only if the caller determines that a kernel halves the memory traffic.
# - rotate_qkv and rotate_back_and_pack: XLA fuses them with the operations around them.
# - mosaic: must be measured against triton first.
# No kernel has a forward-mode derivative: name "xla" for `jax.jvp` on a GPU.
PREFERENCE: dict[str, dict[str, tuple[str, ...]]] = {
    "gpu": {
        "rotate": ("triton",),
        "rotate_by_angles": ("triton",),
        "unpack_and_rotate": ("triton",),
        "attention": ("triton",),
        "attention_qkv": ("triton",),
    },
}


def candidates(op: str, kernels_pay: bool = True) -> tuple[str, ...]:
    """Implementations that `implementation=None` tries for a call of `op`, best first.

    The last one is always "xla", and the only one if XLA may have to partition the call over
    devices. Measured choices for single calls (`choices`) come before these.

    Args:
        op: name of the operation.
        kernels_pay: whether kernels are worth their launch for this call.
    """
    kind = "gpu" if device.is_gpu() else "cpu"
    if not kernels_pay or device.may_be_partitioned():
        return ("xla",)
    return (*PREFERENCE.get(kind, {}).get(op, ()), "xla")


def call(
    op: str, arguments: dict[str, Any], *, implementation: str | None, kernels_pay: bool = True
) -> Any:
    """Computes `op` by the named implementation, or by the first candidate that does not refuse.

    Args:
        op: name of the operation.
        arguments: the operation's arguments by name, without `implementation`.
        implementation: None, or a name in `IMPLEMENTATIONS[op]`.
        kernels_pay: see `candidates`.

    Raises:
        ValueError: the name is unknown, or the named implementation refuses the call.
    """
    if implementation is None:
        tried = candidates(op, kernels_pay)
        default = next(name for name in tried if refusal(op, name, arguments) is None)
        return choices.call(op, arguments, default, run=run, refusal=refusal)
    if implementation not in IMPLEMENTATIONS[op]:
        raise ValueError(
            f"implementation={implementation!r} is not one that {op} has; "
            f"use None or one of {sorted(IMPLEMENTATIONS[op])}"
        )
    if (reason := refusal(op, implementation, arguments)) is not None:
        raise ValueError(
            f"implementation={implementation!r} cannot serve this call of {op}: {reason}; "
            "use None or 'xla'"
        )
    return run(op, implementation, arguments)


def run(op: str, implementation: str, arguments: dict[str, Any]) -> Any:
    """Computes `op` by an implementation that does not refuse."""
    return getattr(module_of(op, implementation), op)(**arguments)


def refusal(op: str, implementation: str, arguments: dict[str, Any]) -> str | None:
    """Why an implementation cannot serve a call of `op`, or None if it can."""
    if implementation == "xla":
        return None
    if implementation not in IMPLEMENTATIONS[op]:
        return f"{op} has no implementation of this name"
    try:
        module = module_of(op, implementation)
    except ImportError as error:
        return f"jax {jax.__version__} does not have what it needs ({error})"
    return module.refusal(**arguments)


def module_of(op: str, implementation: str) -> Any:
    """The module of an implementation, imported when it is first needed."""
    return importlib.import_module(f"{__package__}.{IMPLEMENTATIONS[op][implementation]}")


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
        ValueError: `op` is not an operation of this package.
        TypeError: `op` does not take these arguments.
    """
    name = getattr(op, "__name__", None)
    if name not in IMPLEMENTATIONS or not str(op.__module__).startswith(f"{__package__}."):
        raise ValueError(
            f"op={op!r} is not an operation of rope_jax_kernels; use one of {list(IMPLEMENTATIONS)}"
        )
    bound = inspect.signature(op).bind(*args, **kwargs)
    bound.apply_defaults()
    del bound.arguments["implementation"]
    return {
        implementation: refusal(name, implementation, bound.arguments) or "ok"
        for implementation in IMPLEMENTATIONS[name]
    }
