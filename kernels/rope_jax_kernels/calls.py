"""The call of an operation, as the public functions make it after checking its arguments."""

from typing import Any

from rope_jax_kernels import dispatch
from rope_jax_kernels.tuning.choices import choose
from rope_jax_kernels.tuning.record import note


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
    if implementation is not None:
        return dispatch.run_named(op, implementation, arguments)
    default = dispatch.resolve(op, arguments, kernels_pay)
    if (watched := note(op, arguments, default)) is not None:
        return dispatch.run_by_platform(op, default, watched)
    choice = choose(op, arguments, default)
    return dispatch.run_by_platform(op, choice.implementation, arguments, choice.tile)
