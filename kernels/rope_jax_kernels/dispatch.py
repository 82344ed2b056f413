"""Selection of the implementation of a call.

Every operation has an implementation in plain jax.numpy, "xla", which supports every call. The
others are GPU kernels that refuse unsupported calls with a reason. A call with
`implementation=None` that was not measured (`tuning`) tries the kernels of `PREFERENCE` in order
and falls back to "xla"; it also uses "xla" where its arrays turn out not to be on a GPU.

An implementation is a module with a function for each of its operations, called with the
operation's arguments by name, and (except "xla") `refusal`, which takes the arrays of data by name,
the other arguments as keywords, and returns a sentence or None. With `is_preferred`, of a call's
arguments, it leaves calls that it serves to those after it. Where tiles of a kernel were measured,
the function of an operation is also called with `tile`. Modules are imported when a call first
needs them, so programs on a CPU import no Pallas.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rope_jax_kernels import device

_ROTARY = {"xla": "rotary.reference", "triton": "rotary.triton", "mosaic": "rotary.mosaic"}
_ATTENTION = {
    "xla": "attention.reference",
    "triton": "attention.triton",
    "mosaic": "attention.mosaic",
    "cudnn": "attention.cudnn",
}

# Part of a kernel -> the sizes of its tiles, as a hashable tuple; () for the kernel's own plan.
TileSizes = tuple[tuple[str, tuple[int, ...]], ...]

# Operation -> implementation -> its module in this package.
IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "rotate": _ROTARY,
    "rotate_qkv": _ROTARY,
    "rotate_by_angles": _ROTARY,
    "unpack_and_rotate": {"xla": "rotary.reference", "triton": "rotary.unpack"},
    "attention": _ATTENTION,
    "attention_qkv": _ATTENTION,
}

DATA = ("q", "k", "v", "qkv", "x")  # arguments whose first axis is the batch
# Compute capabilities, times 10; of Blackwell, data center GPUs (10.x).
FROM_AMPERE, HOPPER, HOPPER_AND_BLACKWELL = range(80, 1000), range(90, 100), range(90, 110)

# Operation -> kernels that `implementation=None` tries, best first -> compute capabilities on which
# it does. After them, and without an entry, it uses "xla". Decided by counting the bytes and the
# launches of compiled programs, and the instructions of their machine code for 9.0; not by
# measurements:
# - cudnn: serves `Global` in 16 bits alone. A whole training step of ViT-S with its 197 tokens,
#   which are padded to 198 and sliced, moves 58.5 GB with it, 57.1 with Triton and 52.4 with Mosaic
#   (`ape`, batch 256, jax 0.11.2). But Triton's instructions take 0.18 ms to issue for both passes
#   of a layer on an H200, and by estimate 1.6 to 2.2 times that. XLA's own attention moves 4 times
#   the bytes.
# - mosaic for attention: `Neighborhood` in 16 bits, and `Window` where `is_preferred` of its module
#   says so: on 9.0 it issues 0.2 to 0.6 times the instructions of Triton (Swin, NAT, README), no
#   time of either was measured. For 10.x, where XLA is the alternative, it was compiled for
#   neighbourhoods: no register spills. Rotations and `Global` wait for measurements.
# - triton for attention: what Mosaic does not serve on 9.0, such as float32. It keeps q, k, v and
#   the output; XLA also keeps weights, rolled maps and halos of keys: 2.3 times (Swin) to 8.5 times
#   (NAT) as much. Before 9.0 it has up to 1.8 times the instructions, its backward kernel of
#   windows spills registers, and XLA was not compared with it; for Blackwell (10.x, 12.x) no
#   machine code of it was read: name it there.
# - rotate, rotate_by_angles: only where `kernels_pay`.
# - unpack_and_rotate: the bytes of XLA's form in one launch instead of four.
# - rotate_qkv: none; XLA fuses it with the operations around it.
# No kernel has a forward-mode derivative: name "xla" for `jax.jvp` on a GPU.
PREFERENCE: dict[str, dict[str, range]] = {
    "rotate": {"triton": FROM_AMPERE},
    "rotate_by_angles": {"triton": FROM_AMPERE},
    "unpack_and_rotate": {"triton": FROM_AMPERE},
    "attention": {"cudnn": FROM_AMPERE, "mosaic": HOPPER_AND_BLACKWELL, "triton": HOPPER},
    "attention_qkv": {"cudnn": FROM_AMPERE, "mosaic": HOPPER_AND_BLACKWELL, "triton": HOPPER},
}

# Implementation of attention -> those whose backward pass follows its forward pass: the first that
# serves the task, or else the last.
BACKWARD = {"triton": ("triton",), "mosaic": ("mosaic", "triton")}

# Implementations that XLA can partition over devices; it gathers the operands of the others.
PARTITIONED = ("xla", "cudnn")


def candidates(op: str, kernels_pay: bool = True) -> tuple[str, ...]:
    """Implementations that `implementation=None` tries for a call of `op`, best first.

    The last one is always "xla". Measured choices for single calls (`tuning`) take precedence.

    Args:
        op: name of the operation.
        kernels_pay: whether kernels are worth their launch for this call.
    """
    capability, together = device.capability(), device.may_be_partitioned()
    kernels = PREFERENCE.get(op, {}).items() if kernels_pay else ()
    tried = [name for name, served in kernels if capability in served]
    return (*[name for name in tried if name in PARTITIONED or not together], "xla")


def resolve(op: str, arguments: dict[str, Any], kernels_pay: bool = True) -> str:
    """The implementation of a call with `implementation=None`: the first that is `chosen`.

    Args:
        op: name of the operation.
        arguments: the operation's arguments by name.
        kernels_pay: see `candidates`.
    """
    tried = candidates(op, kernels_pay)
    return next(name for name in tried if chosen(op, name, arguments))


def chosen(op: str, implementation: str, arguments: dict[str, Any]) -> bool:
    """True if an implementation serves a call and, of those that it serves, is preferred for it."""
    if refusal(op, implementation, arguments) is not None:
        return False
    is_preferred = getattr(load_module(op, implementation), "is_preferred", None)
    return is_preferred is None or is_preferred(**arguments)


def run_named(op: str, implementation: str, arguments: dict[str, Any]) -> Any:
    """Computes `op` by the named implementation.

    Raises:
        ValueError: the name is unknown, or the implementation refuses the call.
    """
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


def run(op: str, implementation: str, arguments: dict[str, Any], tile: TileSizes = ()) -> Any:
    """Computes `op` by an implementation that serves the call, with its own tiles or measured ones.

    A kernel keeps the sizes in its static arguments, because its backward pass is traced elsewhere.
    """
    sizes = {"tile": tile} if tile else {}
    return getattr(load_module(op, implementation), op)(**arguments, **sizes)


def run_by_platform(
    op: str, implementation: str, arguments: dict[str, Any], tile: TileSizes = ()
) -> Any:
    """`run` with "xla" in place of a kernel where the program is not lowered for CUDA.

    A process with a GPU also computes on its CPU; which of them runs a program is determined only
    when it is lowered.
    """
    if implementation == "xla" or not device.is_gpu():
        return run(op, implementation, arguments, tile)
    leaves, tree = jax.tree.flatten(arguments)
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]
    fixed = tuple(None if array else x for x, array in zip(leaves, is_array, strict=True))
    arrays = [x for x, array in zip(leaves, is_array, strict=True) if array]
    return _by_platform(op, implementation, tile, tree, fixed, *device.vary_alike(*arrays))


# Within `jit` also for a call outside of it, for which jax would look at the default device.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), inline=True)
def _by_platform(
    op: str, kernel: str, tile: TileSizes, tree: Any, fixed: tuple, *arrays: jax.Array
) -> Any:
    """See `run_by_platform`; `fixed` has None where an array belongs.

    Reverse mode differentiates both branches and saves the residuals of both, with zeros for the
    branch that did not run. So "xla" saves only its operands and recomputes from them.
    """

    def by(implementation: str, tile: TileSizes, *arrays: jax.Array) -> Any:
        remaining = iter(arrays)
        leaves = [next(remaining) if x is None else x for x in fixed]
        return run(op, implementation, jax.tree.unflatten(tree, leaves), tile)

    elsewhere = jax.checkpoint(functools.partial(by, "xla", ()))
    return jax.lax.platform_dependent(
        *arrays, cuda=functools.partial(by, kernel, tile), default=elsewhere
    )


def refusal(op: str, implementation: str, arguments: dict[str, Any]) -> str | None:
    """The reason why an implementation cannot serve a call of `op`, or None if it can."""
    if implementation == "xla":
        return None
    if implementation not in IMPLEMENTATIONS[op]:
        return f"{op} has no implementation of this name"
    try:
        module = load_module(op, implementation)
    except ImportError as error:
        return f"jax {jax.__version__} does not have what it needs ({error})"
    data = select_data(arguments)
    return module.refusal(data, **{x: y for x, y in arguments.items() if x not in data})


def select_data(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arrays that an operation rotates or attends to, among its arguments by name."""
    return {name: arguments[name] for name in DATA if name in arguments}


def refusal_here(op: str, implementation: str, arguments: dict[str, Any]) -> str | None:
    """`refusal`, or the reason why XLA would have to gather the operands first."""
    if implementation not in PARTITIONED and device.may_be_partitioned():
        return "XLA would have to partition it over devices"
    return refusal(op, implementation, arguments)


def backward_pass(implementation: str, task: Any) -> Callable:
    """The backward pass of `attention.kernel` after the forward pass of an implementation."""
    *others, last = (load_module("attention", name) for name in BACKWARD[implementation])
    return next((module for module in others if module.serves_backward(task)), last).backward


def load_module(op: str, implementation: str) -> Any:
    """The module of an implementation, imported when it is first needed."""
    return importlib.import_module(f"{__package__}.{IMPLEMENTATIONS[op][implementation]}")
