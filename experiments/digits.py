"""The digits recipe with several schemes: accuracy at every resolution, for the README's table.

    python -m experiments digits --out experiments/results/digits_cpu.json

Runs `rope_jax compare` with one seed; finished runs in the workdir are not repeated. Takes about
ten minutes on two CPU cores.
"""

import json
import os
import pathlib

from benchmarks._runner import Keep
from rope_jax.commands import compare

SCHEMES = ["none", "ape", "rpb", "rope2d", "rope_mixed", "axial_rope"]


def run(
    keep: Keep,
    *,
    workdir: pathlib.Path = pathlib.Path("runs/compare"),
    schemes: list[str] = SCHEMES,
) -> None:
    """Trains every scheme with seed 0.

    Args:
        keep: saves the result.
        workdir: folder for the workdirs of the runs
        schemes: schemes to train
    """
    arguments = ["--config=digits", "--seeds=1", f"--positions={','.join(schemes)}"]
    compare.main([*arguments, f"--out={workdir}"])
    evaluated = [json.loads((workdir / x / "results.json").read_text())["eval"] for x in schemes]
    sizes = ["{}x{} px".format(*row["resolution"]) for row in evaluated[0]]
    rows = [
        [f"`{position}`", *(f"{100 * row['top1']:.1f}" for row in scheme_rows)]
        for position, scheme_rows in zip(schemes, evaluated, strict=True)
    ]
    count = evaluated[0][0]["count"]
    note = f"Top-1 accuracy (%) on {count} held-out digits; trained at {sizes[0]}, seed 0."
    keep(cores=os.cpu_count(), columns=["position", *sizes], rows=rows, note=note)
