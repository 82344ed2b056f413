"""Collects the runs of an experiment: accuracy, attention, and verdicts on the papers' claims.

    python -m experiments evidence runs/tiny_imagenet/* --part tiny_imagenet --out FILE.json

Models, images, recipe and claims of the experiment were written down in PART.md of this folder
before its runs. Runs in the file of --out are kept and not read again, so that an experiment can
be trained in parts, on several machines.
"""

import dataclasses
import datetime
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from benchmarks._runner import Keep
from experiments.extend import Table, spread
from rope_jax.analysis.analyses import image_batches
from rope_jax.analysis.attention import attention_statistics
from rope_jax.analysis.runs import RunResults, read_runs
from rope_jax.papers.claims import Claim, Verdict, above, as_good
from rope_jax.papers.runs import Run
from rope_jax.runs.loading import load_run
from rope_jax.system.compilation import keep_compiled
from rope_jax.system.files import read_json

Row = dict[str, Any]  # of a run: position, seed, date, eval, attention

FIRST_SEEDS = 5  # a claim that they decide narrowly is tested again with later ones
SMALLER, TRAINED, LARGER = (16, 24), (32,), (40, 48, 64)
CLAIMS: Mapping[str, Mapping[str, Sequence[Claim]]] = {
    "tiny_imagenet": {
        "Heo et al., figure 4": (
            *above("rope2d", "ape", at=LARGER),
            *above("rope_mixed", "ape", at=LARGER),
            *above("rope_mixed", "rope2d", at=SMALLER + TRAINED + LARGER),
        ),
        "Heo et al., figure 6": (
            *above("rope_mixed+ape", "rope_mixed", at=SMALLER),
            *above("rope_mixed", "rope_mixed+ape", at=LARGER),
        ),
        "thesis, table 4.1": (
            *above("axial_rope", "rpb", "none", at=TRAINED),
            *above("rpb", "none", at=TRAINED),
        ),
        "thesis, table 4.3": (
            as_good("axial_rope", "axial_rope(k_rope=1)", at=TRAINED),
            as_good("axial_rope(k_rope=8)", "axial_rope(k_rope=1)", at=TRAINED),
            *above("axial_rope(k_rope=8)", "axial_rope", at=SMALLER + LARGER),
            *above("axial_rope(k_rope=1)", "rope2d", at=LARGER),
            *above("axial_rope", "rope2d", at=LARGER),
            *above("axial_rope(k_rope=8)", "rope2d", at=LARGER),
        ),
    }
}
# Heo et al., figures 2 and 3: attention of blocks 2 and 3 of 4, at sizes in pixels.
ATTENTION_CLAIMS = (*above("rope2d", "ape"), *above("rope_mixed", "ape"))
ATTENTION = {"distance": "mean distance (tokens)", "entropy": "entropy (nats)"}
BLOCKS, SIDES = (2, 3), (16, 32, 56)


def read_row(run: RunResults) -> Row:
    """Reads a run: its accuracies, and attention distance and entropy by size and block."""
    attention = {}
    for side in SIDES:
        loaded = load_run(str(run.workdir), step=run.step, seed=run.config.seed)
        batches = image_batches(loaded, None, str(side), count=run.rows[0]["count"], batch_size=50)
        statistics = attention_statistics(loaded.model, (batch for _, batch in batches))
        attention[str(side)] = {
            name: [round(float(heads.mean()), 5) for heads in getattr(statistics, name)]
            for name in ATTENTION
        }
    finished = (run.workdir / "results.json").stat().st_mtime
    return {
        "position": run.config.model.position,
        "seed": run.config.seed,
        "date": datetime.datetime.fromtimestamp(finished, datetime.UTC).isoformat(),
        "eval": [{name: row[name] for name in ("resolution", "top1", "count")} for row in run.rows],
        "attention": attention,
    }


def top1(row: Row, side: int) -> float:
    """Accuracy of a run at a resolution, in percent."""
    (score,) = [x["top1"] for x in row["eval"] if x["resolution"] == [side, side]]
    return 100 * score


def judge(claim: Claim, rows: Sequence[Row], value: Callable[[Row, int], float]) -> Verdict:
    """The verdict on a claim about the number `value` of runs at the claim's sizes."""
    by_position: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_position.setdefault(row["position"], {})[row["seed"]] = row
    verdicts = claim.judge(
        [Run("", position) for position in by_position],
        lambda run, side: {
            seed: value(row, side) for seed, row in by_position[run.position].items()
        },
        after_the_fact=False,
    )
    return next(verdicts, {"verdict": "not tested", "interval": None})


def in_words(verdict: Verdict, digits: int = 1) -> str:
    """The difference with its interval, and the verdict.

    >>> in_words({"verdict": "shown", "difference": 2.0, "interval": [1.5, 2.5]})
    '+2.0 ± 0.5, shown'
    """
    if verdict["interval"] is None:
        return verdict["verdict"]
    low, high = verdict["interval"]
    difference, half = verdict["difference"], (high - low) / 2
    return f"{difference:+.{digits}f} ± {half:.{digits}f}, {verdict['verdict']}"


def is_narrow(verdict: Verdict, margin: float) -> bool:
    """Checks if a claim is decided by less than twice the half interval."""
    if verdict["verdict"] not in ("shown", "refuted"):
        return False
    low, high = verdict["interval"]
    return abs(verdict["difference"] + margin) < high - low


def accuracies(rows: Sequence[Row]) -> Table:
    """Accuracy of every scheme at every resolution, the most accurate at the first one first."""
    sizes = [score["resolution"] for score in rows[0]["eval"]]
    by_position: dict[str, list[Row]] = {}
    for row in rows:
        by_position.setdefault(row["position"], []).append(row)
    lines = [
        [
            f"`{position}`",
            str(len(runs)),
            *(spread([top1(run, side) for run in runs]) for side, _ in sizes),
        ]
        for position, runs in by_position.items()
    ]
    lines.sort(key=lambda line: float(line[2].split()[0]), reverse=True)
    return {
        "columns": ["position", "seeds", *(f"{side} px" for side, _ in sizes)],
        "rows": lines,
        "note": f"Top-1 accuracy (%) of {rows[0]['eval'][0]['count']:,} test images, mean and "
        f"95 % interval over seeds; trained at {sizes[0][0]} px.",
    }


def verdicts(rows: Sequence[Row], claims: Mapping[str, Sequence[Claim]]) -> Table:
    """The verdict on every claim over all its resolutions, and at each by itself."""
    first = [row for row in rows if row["seed"] < FIRST_SEEDS]
    later = [row for row in rows if row["seed"] >= FIRST_SEEDS]
    lines = []
    for source, claim in [(source, claim) for source, group in claims.items() for claim in group]:
        verdict, again = judge(claim, first, top1), judge(claim, later, top1)
        texts = [in_words(verdict)]
        if again["interval"]:
            texts.append(f"seeds 5 to 9: {in_words(again)}")
        elif is_narrow(verdict, claim.margin):
            texts.append("to be tested again")
        each = []
        if verdict["interval"] and len(claim.at) > 1:
            each = [
                f"{side} px: {in_words(judge(dataclasses.replace(claim, at=(side,)), first, top1))}"
                for side in claim.at
            ]
        words = f"`{claim.better}` {'as good as' if claim.margin else 'above'} `{claim.worse}`"
        sides = ", ".join(map(str, claim.at))
        lines.append([words, source, sides, "<br>".join(texts), "<br>".join(each)])
    return {
        "columns": ["claim", "source", "sizes (px)", "mean over the sizes", "each size"],
        "rows": lines,
        "note": "Differences in points of top-1 accuracy, with 95 % intervals over seeds.",
    }


def attention_verdicts(rows: Sequence[Row]) -> Table:
    """The verdicts on the attention of the middle blocks, by number, block and resolution."""
    lines = []
    for claim in ATTENTION_CLAIMS:
        for name, label in ATTENTION.items():
            for block in BLOCKS:
                value = lambda row, side: row["attention"][str(side)][name][block - 1]  # noqa: B023
                cells = [
                    in_words(judge(dataclasses.replace(claim, at=(side,)), rows, value), digits=2)
                    for side in SIDES
                ]
                words = f"`{claim.better}` above `{claim.worse}`"
                lines.append([words, label, str(block), *cells])
    return {
        "columns": ["claim", "number", "block", *(f"{side} px" for side in SIDES)],
        "rows": lines,
        "note": f"Mean over heads and {rows[0]['eval'][0]['count']:,} test images; differences "
        "with 95 % intervals over seeds.",
    }


def run(
    keep: Keep,
    runs: list[pathlib.Path],
    *,
    part: Literal["tiny_imagenet"] = "tiny_imagenet",
    out: pathlib.Path | None = None,
) -> None:
    """Reads finished runs that the file of --out does not hold yet.

    Args:
        keep: saves the result.
        runs: workdirs of runs
        part: the experiment
        out: the JSON file; runs that it holds are not read again.
    """
    keep_compiled()
    rows = read_json(out)["runs"] if out is not None and out.exists() else []
    finished = [run for folder in runs for run in read_runs(folder)]
    for run in finished:
        name = {"position": run.config.model.position, "seed": run.config.seed}
        if not any(name.items() <= row.items() for row in rows):
            rows.append(read_row(run))
            print(f"{name['position']}, seed {name['seed']}", flush=True)
    tables = [accuracies(rows), verdicts(rows, CLAIMS[part]), attention_verdicts(rows)]
    complete = all(row[3] != "not tested" for row in tables[1]["rows"])
    keep(settings={"part": part}, complete=complete, runs=rows, tables=tables)
