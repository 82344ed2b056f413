"""A training step with its blocks in a list against the same one with its blocks in a scan (`scan_layers=True`).

For each depth: seconds to trace and compile the step (forward, backward, AdamW), median milliseconds to run it, in turns so that a busy
moment of the machine hits both, and bytes that the compiled program allocates. Run: python -m benchmarks scan --out results.json
"""

import argparse
import dataclasses
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import rope_jax
from benchmarks._record import record, write
from benchmarks._training import training_step
from rope_jax import optim
from rope_jax.config import OptimConfig


@dataclasses.dataclass(frozen=True)
class Row:
    """What one form of a model costs."""

    depth: int
    scan: bool
    compile_s: float
    step_ms: float
    temp_bytes: int


class Step:
    """A compiled training step with its state."""

    def __init__(self, name: str, *, depth: int, scan: bool, batch: int, image_size: int, dtype: str):
        model = rope_jax.create_model(name, depth=depth, image_size=image_size, dtype=jnp.dtype(dtype), scan_layers=scan)
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        optimizer = optim.make_optimizer(OptimConfig(), optax.constant_schedule(1e-4), params)
        images = jax.random.normal(jax.random.key(0), (batch, image_size, image_size, 3))
        params = nnx.to_pure_dict(params)
        self.state, self.images = {"params": params, "opt": optimizer.init(params)}, images
        start = time.perf_counter()
        self.step = jax.jit(training_step(graph, rest, optimizer), donate_argnums=0).lower(self.state, images).compile()
        self.compile_s = time.perf_counter() - start

    def run(self) -> float:
        """Runs one step; returns milliseconds."""
        start = time.perf_counter()
        self.state, loss = self.step(self.state, self.images)
        jax.block_until_ready(loss)
        return 1e3 * (time.perf_counter() - start)


def compare(name: str, depth: int, *, batch: int, image_size: int, turns: int, dtype: str = "float32") -> list[Row]:
    """Measures both forms at one depth, the list first, and makes sure that they compute the same."""
    # The scan is compiled first: what XLA tunes or loads once in a process is at its cost, not the list's.
    forms = {scan: Step(name, depth=depth, scan=scan, batch=batch, image_size=image_size, dtype=dtype) for scan in (True, False)}
    times = {scan: [] for scan in forms}
    for turn in range(turns + 1):
        for scan, step in forms.items():
            took = step.run()
            if turn:  # the first one warms up
                times[scan].append(took)
    rows = [
        Row(depth, scan, forms[scan].compile_s, statistics.median(times[scan]), forms[scan].step.memory_analysis().temp_size_in_bytes)
        for scan in (False, True)
    ]
    one, other = (step.state["params"]["head"]["kernel"] for step in forms.values())
    # On average: where a gradient is nearly 0, AdamW's step has the sign of a rounding error.
    if jnp.abs(one - other).mean() > (5e-5 if dtype == "float32" else 5e-4):
        raise AssertionError("the two forms have trained to different weights")
    return rows


def table(rows: list[Row]) -> str:
    """The rows as a table in Markdown."""
    lines = ["| blocks | blocks in | compile, s | step, ms | temporary memory, MB |", "|---|---|---|---|---|"]
    for row in rows:
        form = "a scan" if row.scan else "a list"
        lines.append(f"| {row.depth} | {form} | {row.compile_s:.1f} | {row.step_ms:.0f} | {row.temp_bytes / 1e6:.0f} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scan", description=__doc__)
    parser.add_argument("--model", default="deit3_ti16", help="an isotropic model")
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 12, 24])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--turns", type=int, default=5, help="timed steps of each form")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    args = parser.parse_args(argv)
    rows = []
    for depth in args.depths:
        rows += compare(args.model, depth, batch=args.batch, image_size=args.image_size, turns=args.turns)
    print(table(rows))
    write(record("scan", vars(args), rows=[dataclasses.asdict(row) for row in rows]), args.out)
