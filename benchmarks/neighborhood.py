"""Neighbourhood attention by tiles, as rope_jax_kernels computes it, against a gather of every query's keys.

Times one forward and backward pass of both, compiled, in turns, so that a busy moment of the machine hits both. A turn is several
passes, of which the first is not counted: it finds the caches full of the other form's data. Memory is what the compiled program
allocates beside its arguments and results. Run: python -m benchmarks neighborhood --out results.json
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._record import record, write
from rope_jax_kernels import Neighborhood, attention

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one form costs: median milliseconds a pass, all its passes, and bytes of temporary memory."""

    median_ms: float
    times_ms: list[float]
    temp_bytes: int


def gathered_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, kernel: int) -> jax.Array:
    """Neighbourhood attention with a copy of each query's keys and values, [B, N, H*W, K*K, D]: the obvious way, done well.

    Heads come before tokens, so that the products are batched without a transposition of the copies.
    """
    batch, height, width, heads, head_dim = q.shape
    rows, columns = (np.clip(np.arange(n) - kernel // 2, 0, n - kernel)[:, None] + np.arange(kernel) for n in (height, width))
    neighbors = (rows[:, None, :, None] * width + columns[None, :, None, :]).reshape(height * width, kernel * kernel)
    q, k, v = (x.reshape(batch, height * width, heads, head_dim).swapaxes(1, 2) for x in (q, k, v))
    k, v = k[:, :, neighbors], v[:, :, neighbors]
    logits = jnp.einsum("bnqd,bnqkd->bnqk", q, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    out = jnp.einsum("bnqk,bnqkd->bnqd", weights, v, preferred_element_type=jnp.float32).astype(q.dtype)
    return out.swapaxes(1, 2).reshape(batch, height, width, heads, head_dim)


def tiled_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, kernel: int) -> jax.Array:
    """The same by the public function, in plain XLA."""
    return attention(q, k, v, pattern=Neighborhood(size=(kernel, kernel)), implementation="xla")


def compile_training_pass(form: Callable, arrays: list[jax.Array]) -> jax.stages.Compiled:
    """Compiles the output of `form` and its gradients, given q, k, v and the output's cotangent."""

    def training_pass(q, k, v, cotangent):
        out, pull_back = jax.vjp(form, q, k, v)
        return out, *pull_back(cotangent)

    return jax.jit(training_pass).lower(*arrays).compile()


def compare(forms: dict[str, Callable], arrays: list[jax.Array], turns: int, passes_per_turn: int) -> dict[str, Figures]:
    """Measures all forms in turns, and makes sure that they agree."""
    passes = {name: compile_training_pass(form, arrays) for name, form in forms.items()}
    results = [jax.block_until_ready(run(*arrays)) for run in passes.values()]
    tolerance = 1e-4 if arrays[0].dtype == jnp.float32 else 5e-2
    for result in results[1:]:
        for x, expected in zip(result, results[0], strict=True):
            np.testing.assert_allclose(np.float32(x), np.float32(expected), rtol=tolerance, atol=tolerance)
    times = {name: [] for name in passes}
    for _ in range(turns):
        for name, run in passes.items():
            jax.block_until_ready(run(*arrays))
            for _ in range(passes_per_turn):
                start = time.perf_counter()
                jax.block_until_ready(run(*arrays))
                times[name].append(1e3 * (time.perf_counter() - start))
    memory = {name: run.memory_analysis().temp_size_in_bytes for name, run in passes.items()}
    return {name: Figures(statistics.median(times[name]), times[name], memory[name]) for name in passes}


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks neighborhood", description=__doc__)
    parser.add_argument("--size", type=int, default=56, help="rows and columns of the map")
    parser.add_argument("--kernel", type=int, default=7, help="rows and columns of the neighbourhood")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--turns", type=int, default=7, help="how often the forms take turns")
    parser.add_argument("--passes", type=int, default=5, help="timed passes in a turn, after one that is not timed")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> dict:
    """Compares the two forms and returns everything that is worth keeping."""
    shape = (args.batch, args.size, args.size, args.heads, args.head_dim)
    arrays = [jax.random.normal(key, shape, DTYPES[args.dtype]) for key in jax.random.split(jax.random.key(0), 4)]
    forms = {"gather": gathered_attention, "tiled": tiled_attention}
    forms = {name: functools.partial(form, kernel=args.kernel) for name, form in forms.items()}
    figures = compare(forms, arrays, args.turns, args.passes)
    gather, tiled = figures["gather"], figures["tiled"]
    return record(
        "neighborhood",
        vars(args),
        figures={name: dataclasses.asdict(x) for name, x in figures.items()},
        time_ratio=gather.median_ms / tiled.median_ms,
        memory_ratio=gather.temp_bytes / tiled.temp_bytes,
    )


def main(argv: list[str]) -> None:
    """Prints a table of the comparison, and writes it where --out says."""
    args = parse(argv)
    result = run(args)
    print(f"{args.size} x {args.size} map, K = {args.kernel}, forward and backward, on {result['machine']['device']}")
    print(f"{'form':8}{'ms':>10}{'temporary MB':>16}")
    for name, figures in result["figures"].items():
        print(f"{name:8}{figures['median_ms']:10.2f}{figures['temp_bytes'] / 1e6:16.1f}")
    print(f"{'ratio':8}{result['time_ratio']:10.2f}{result['memory_ratio']:16.2f}")
    write(result, args.out)
