"""Which implementations would serve a call, and why the others would not."""

import inspect
from collections.abc import Callable

from rope_jax_kernels import backends
from rope_jax_kernels.attention import api as attention_api
from rope_jax_kernels.rotary import api as rotary_api

BACKENDS = {
    rotary_api.rotate: rotary_api.ROTATE,
    rotary_api.rotate_qkv: rotary_api.ROTATE_QKV,
    rotary_api.rotate_by_angles: rotary_api.ROTATE_BY_ANGLES,
    attention_api.attention: attention_api.ATTENTION,
    attention_api.attention_qkv: attention_api.ATTENTION_QKV,
}


def explain(op: Callable, *args, **kwargs) -> dict[str, str]:
    """Says of each implementation of `op` whether it can serve the call `op(*args, **kwargs)`, without computing anything.

    Args:
        op: `rotate`, `rotate_qkv`, `rotate_by_angles`, `attention` or `attention_qkv`.
        *args: what `op` would be given.
        **kwargs: what `op` would be given; `implementation` makes no difference.

    Returns:
        Implementation -> "ok" or the reason why it refuses.

    Raises:
        ValueError: `op` is not an operation of this package.
        TypeError: `op` does not take these arguments.
    """
    if op not in BACKENDS:
        raise ValueError(f"op={op!r} is not an operation of rope_jax_kernels; use one of {[f.__name__ for f in BACKENDS]}")
    # Refusals are asked with all arguments, defaults included, just as the operation itself asks them.
    call = inspect.signature(op).bind(*args, **kwargs)
    call.apply_defaults()
    del call.arguments["implementation"]
    return backends.reasons(BACKENDS[op], call.args, call.kwargs)
