"""Collects the runs of an experiment: accuracy, attention, and verdicts on the papers' claims.

    python -m benchmarks evidence runs/tiny_imagenet/* --part tiny_imagenet --out FILE.json

Models, images, recipe and claims of the experiment were written down in experiments/PART.md before
its runs. Runs in the file of --out are kept and not read again, so that an experiment can
be trained in parts, on several machines; folders without results are left out. Evaluations of a
run with `rope_jax evaluate --extend=interpolate` at all its other sizes are a scheme of their own,
as the design says. A claim has no verdict before all its seeds are there.
"""

import dataclasses
import datetime
import itertools
import operator
import pathlib
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

import jax

from benchmarks._runner import Keep
from rope_jax.analysis.analyses import image_batches
from rope_jax.analysis.attention import attention_statistics
from rope_jax.analysis.intervals import student
from rope_jax.analysis.runs import RunResults, read_runs
from rope_jax.config import Config, settings
from rope_jax.papers.claims import Claim, Verdict, above, as_good, in_words, judge
from rope_jax.runs.loading import load_run
from rope_jax.system.compilation import keep_compiled
from rope_jax.system.files import read_json

Table = dict[str, Any]  # columns and rows of text, and a note
Row = dict[str, Any]  # of a run: position, seed, step, date, machine, jax, eval, attention
Value = Callable[[Row, int], float]  # a number of a run at a size in pixels

SEEDS = 5  # of each scheme; a claim that they decide narrowly is tested again with seeds 5 to 9
AGAIN = "to be tested again"
EXTEND = "interpolate"  # rule of the further evaluations, `rope_jax evaluate RUN --extend=...`
INTERPOLATED = {x: f"{x}(extend={EXTEND})" for x in ("rope2d", "rope_mixed")}
FIRST_INTERPOLATED = 2  # the first seed that counts
SHARED = {  # the same angles in all heads
    "axial_rope": "axial_rope(shared=True)",
    "axial_rope(k_rope=8)": "axial_rope(k_rope=8,shared=True)",
}
FEWER_SEEDS = dict.fromkeys(("rope_mixed+ape", *INTERPOLATED.values(), *SHARED.values()), 3)
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
        "thesis, tables 4.2 and 4.3": [
            claim
            for own, shared in SHARED.items()
            for claim in (as_good(shared, own, at=TRAINED), *above(shared, own, at=LARGER))
        ],
        "our runs on Fashion-MNIST": [
            claim
            for position, interpolated in INTERPOLATED.items()
            for sizes in (SMALLER, LARGER)
            for claim in above(interpolated, position, "ape", at=sizes)
        ],
    }
}
# Heo et al., figures 2 and 3: attention of blocks 2 and 3 of 4, at sizes in pixels.
ATTENTION_CLAIMS = (*above("rope2d", "ape"), *above("rope_mixed", "ape"))
ATTENTION = {"distance": "mean distance (tokens)", "entropy": "entropy (nats)"}
BLOCKS, SIDES = (2, 3), (16, 32, 56)


def describe_run(run: RunResults, position: str, scores: Sequence[Mapping[str, Any]]) -> Row:
    """The origin of a run, and its accuracies."""
    finished = (run.workdir / "results.json").stat().st_mtime
    return {
        "position": position,
        "seed": run.config.seed,
        "step": run.step,
        "date": datetime.datetime.fromtimestamp(finished, datetime.UTC).isoformat(),
        "machine": platform.platform(),
        "jax": jax.__version__,
        "eval": [{name: row[name] for name in ("resolution", "top1", "count")} for row in scores],
    }


def interpolated_scores(run: RunResults) -> list[Mapping[str, Any]]:
    """The scores of a run with interpolated positions; none before all sizes are evaluated."""
    asked = {"extend": EXTEND, "log_scale": False, "step": run.step}
    by_size = {
        tuple(row["resolution"]): row
        for row in run.others
        if row["asked"].items() >= asked.items() and "images" not in row["asked"]
    }
    trained, *others = run.rows  # at the training size, rules make no difference
    sizes = [tuple(row["resolution"]) for row in others]
    return [trained, *map(by_size.get, sizes)] if by_size.keys() >= {*sizes} else []


def read_attention(run: RunResults) -> dict[str, Any]:
    """Measures the attention distance and entropy of a run, by size and block."""
    loaded = load_run(str(run.workdir), step=run.step, seed=run.config.seed)
    attention = {}
    for side in SIDES:
        batches = image_batches(loaded, None, str(side), count=run.rows[0]["count"], batch_size=50)
        statistics = attention_statistics(loaded.model, (batch for _, batch in batches))
        attention[str(side)] = {
            name: [round(float(heads.mean()), 5) for heads in getattr(statistics, name)]
            for name in ATTENTION
        }
    return attention


def recipe(config: Config) -> dict[str, str]:
    """The settings that all runs of an experiment share."""
    return {
        name: str(operator.attrgetter(name)(config))
        for name, field in settings().items()
        if name not in ("model.position", "seed", "data.path") and not field.metadata["resumable"]
    }


def top1(row: Row, side: int) -> float:
    """Accuracy of a run at a resolution, in percent."""
    (score,) = [x["top1"] for x in row["eval"] if x["resolution"] == [side, side]]
    return 100 * score


def judge_claim(claim: Claim, rows: Sequence[Row], value: Value) -> Verdict:
    """The verdict on a claim about a number of runs, averaged over the claim's sizes."""
    better, worse = (
        {
            row["seed"]: fmean(value(row, side) for side in claim.at)
            for row in rows
            if row["position"] == position
        }
        for position in (claim.better, claim.worse)
    )
    return judge(better, worse, claim.margin)


def is_narrow(verdict: Verdict, margin: float) -> bool:
    """Checks if a claim is decided by less than twice the half interval."""
    if verdict["verdict"] not in ("shown", "refuted"):
        return False
    low, high = verdict["interval"]
    return abs(verdict["difference"] + margin) < high - low


def verdict_texts(
    claim: Claim, rows: Sequence[Row], value: Value = top1, digits: int = 1
) -> list[str]:
    """The verdict of the first seeds, and that of seeds 5 to 9 once all five are there.

    Before, `AGAIN` says that the first verdict is narrow.
    """
    first = [row for row in rows if row["seed"] < SEEDS]
    verdict = judge_claim(claim, first, value)
    planned = min(FEWER_SEEDS.get(x, SEEDS) for x in (claim.better, claim.worse))
    if verdict["interval"] is None:
        return ["not tested"]
    if (seeds := len(verdict["seeds"])) < planned:
        return [in_words(verdict | {"verdict": f"{seeds} of {planned} seeds"}, digits)]
    later = judge_claim(claim, [row for row in rows if row["seed"] >= SEEDS], value)
    texts = [in_words(verdict, digits)]
    if len(later["seeds"]) == SEEDS:
        texts.append(f"seeds 5 to 9: {in_words(later, digits)}")
    elif is_narrow(verdict, claim.margin):
        texts.append(AGAIN)
    return texts


def spread(values: Sequence[float]) -> str:
    """Formats mean and 95 % interval (Student's t).

    >>> spread([1.0, 3.0])
    '2.0 ± 12.7'
    """
    mean, half = student(values)
    return f"{mean:.1f}" + (f" ± {half:.1f}" if len(values) > 1 else "")


def tabulate_accuracies(rows: Sequence[Row]) -> Table:
    """Lists the accuracy of every scheme and size of the first seeds, the most accurate first."""
    sizes = [score["resolution"] for score in rows[0]["eval"]]
    by_position: dict[str, list[Row]] = {}
    for row in rows:
        if row["seed"] < SEEDS:
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


def tabulate_verdicts(rows: Sequence[Row], claims: Mapping[str, Sequence[Claim]]) -> Table:
    """Lists the verdict on every claim over all its resolutions, and at each by itself."""
    lines = []
    for source, claim in [(source, claim) for source, group in claims.items() for claim in group]:
        by_size = [verdict_texts(dataclasses.replace(claim, at=(side,)), rows) for side in claim.at]
        each = [
            f"{side} px: {'; '.join(text for text in texts if text != AGAIN)}"
            for side, texts in zip(claim.at, by_size, strict=True)
        ]
        lines.append(
            [
                f"`{claim.better}` {'as good as' if claim.margin else 'above'} `{claim.worse}`",
                source,
                ", ".join(map(str, claim.at)),
                "<br>".join(verdict_texts(claim, rows)),
                "<br>".join(each) if len(each) > 1 else "",
            ]
        )
    return {
        "columns": ["claim", "source", "sizes (px)", "mean over the sizes", "each size"],
        "rows": lines,
        "note": "Differences in points of top-1 accuracy on "
        f"{rows[0]['eval'][0]['count']:,} test images, with 95 % intervals over seeds 0 to 4, or "
        "three of them, unless stated otherwise.",
    }


def tabulate_attention(rows: Sequence[Row]) -> Table:
    """Lists the verdicts on the attention of the middle blocks by number, block and size."""
    lines = []
    for claim, (name, label), block in itertools.product(
        ATTENTION_CLAIMS, ATTENTION.items(), BLOCKS
    ):

        def value(row: Row, side: int, name: str = name, block: int = block) -> float:
            return row["attention"][str(side)][name][block - 1]

        at_sides = [dataclasses.replace(claim, at=(side,)) for side in SIDES]
        cells = ["<br>".join(verdict_texts(x, rows, value, digits=2)) for x in at_sides]
        lines.append([f"`{claim.better}` above `{claim.worse}`", label, str(block), *cells])
    return {
        "columns": ["claim", "number", "block", *(f"{side} px" for side in SIDES)],
        "rows": lines,
        "note": f"Mean over heads and {rows[0]['eval'][0]['count']:,} test images; differences "
        "with 95 % intervals over seeds 0 to 4, unless stated otherwise.",
    }


def is_complete(tables: Sequence[Table]) -> bool:
    """Checks if all claims have their seeds, and narrow ones were tested again."""
    cells = [cell for table in tables for line in table["rows"] for cell in line]
    return not any(re.search(rf"not tested|\d of \d seeds|{AGAIN}", cell) for cell in cells)


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
    stored = read_json(out) if out is not None and out.exists() else {"runs": []}
    rows = stored["runs"]
    for folder in runs:
        if not (folder / "results.json").is_file():
            continue
        for result in read_runs(folder):
            position, seed = result.config.model.position, result.config.seed
            if stored.setdefault("recipe", recipe(result.config)) != recipe(result.config):
                raise SystemExit(f"{folder} was trained with another recipe than those of {out}")
            known = {row["position"] for row in rows if row["seed"] == seed}
            new = []
            if position not in known:
                attention = {"attention": read_attention(result)}
                new.append(describe_run(result, position, result.rows) | attention)
            interpolated = INTERPOLATED.get(position)
            scores = interpolated_scores(result) if seed >= FIRST_INTERPOLATED else []
            if interpolated is not None and scores and interpolated not in known:
                new.append(describe_run(result, interpolated, scores))
            if not new:
                continue
            rows += new
            print(f"{position}, seed {seed}", flush=True)
            tables = [
                tabulate_accuracies(rows),
                tabulate_verdicts(rows, CLAIMS[part]),
                tabulate_attention(rows),
            ]
            keep(
                settings={"part": part},
                complete=is_complete(tables[1:]),
                recipe=stored["recipe"],
                runs=rows,
                tables=tables,
            )
