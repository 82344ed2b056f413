"""Global attention in plain JAX: memory of its gradient, whole and in blocks of queries.

    python -m benchmarks blocks --out benchmarks/results/blocks_cpu.json

One example of 4 heads of 64 channels in float32, without a bias. Memory is what XLA plans for this
device. Maps of up to 56 x 56 tokens are computed, too, both forms in turns.
"""

import functools
import importlib
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks._runner import Keep
from rope_jax.analysis.timing import measure_call, take_turns
from rope_jax.names.text import format_table
from rope_jax_kernels import Global, attention_qkv

SIDES, MOST_TIMED, TURNS = (14, 28, 56, 112), 56, 7
COLUMNS = ("tokens", "whole, MB", "in blocks, MB", "time in blocks / whole")


def compile_gradient(side: int, most_tokens: int) -> jax.stages.Compiled:
    """Compiles the gradient of attention of side^2 tokens, whole up to `most_tokens`."""
    reference = importlib.import_module("rope_jax_kernels.attention.reference")
    packed = jax.ShapeDtypeStruct((1, side**2, 3, 4, 64), jnp.float32)
    attend = lambda qkv: attention_qkv(qkv, pattern=Global(), implementation="xla")
    with mock.patch.object(reference, "MOST_TOKENS", most_tokens):
        gradient = jax.jit(jax.grad(lambda qkv: (attend(qkv) ** 2).sum()))
        return gradient.lower(packed).compile()


def timer(compiled: jax.stages.Compiled, side: int) -> Callable[[], float]:
    """Returns a function that computes a gradient and returns the microseconds that it took."""
    qkv = jax.random.normal(jax.random.key(0), (1, side**2, 3, 4, 64))
    measure_call(compiled, qkv)
    return functools.partial(measure_call, compiled, qkv)


def run(keep: Keep) -> None:
    """Compiles both forms for each map.

    Args:
        keep: saves the result.
    """
    rows = []
    for side in SIDES:
        forms = {"whole": compile_gradient(side, side**2), "blocks": compile_gradient(side, 0)}
        bytes_of = {name: form.memory_analysis().temp_size_in_bytes for name, form in forms.items()}
        ratio = ""
        if side <= MOST_TIMED:
            times = take_turns({name: timer(form, side) for name, form in forms.items()}, TURNS)
            ratio = f"{times['blocks'] / times['whole']:.2f}"
        memory = (f"{bytes_of[name] / 1e6:,.0f}" for name in ("whole", "blocks"))
        rows.append([f"{side} x {side}", *memory, ratio])
        keep(settings={}, columns=COLUMNS, rows=rows, note="4 heads of 64 channels, float32.")
    print(format_table(COLUMNS, rows))
