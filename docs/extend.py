"""Tables of the experiment `extend`: what each rule for rotations does at other sizes."""

import collections
import operator
from collections.abc import Sequence
from typing import Any

from benchmarks._runner import Result
from docs.results import newest, no_result, origin
from experiments._claims import interval, trained_size
from experiments._parts import PARTS
from experiments.extend import Row, differences, helping, resolutions
from rope_jax.text import markdown_table


def extend(results: Sequence[Result]) -> str:
    """Scores of every scheme at every size, the differences of the rules, and which help where."""
    result = newest(results, "evidence", part="fashion")
    if not (rows := rows_of(result) if result else []):
        return no_result("experiments evidence fashion")
    lines, verdicts, sizes = [], [], resolutions(rows)
    for model, position in dict.fromkeys((row["model"], row["position"]) for row in rows):
        for rule in dict.fromkeys(row["rule"] for row in rows):
            by_size = [differences(rows, model, position, rule, size) for size in sizes]
            if any(by_size):
                names = [f"`{model}`", f"`{position}`", f"`{rule}`"]
                lines.append([*names, *(cell(values, rule) for values in by_size)])
        found = [
            f"at {height}x{width} px, `{'`, `'.join(best)}`"
            for (height, width), best in helping(rows, model, position).items()
        ]
        verdicts.append(f"- `{model}` with `{position}`: {'; '.join(found) or 'none is'}.")
    header = ["model", "position", "rule", *("{}x{} px".format(*size) for size in sizes)]
    table = markdown_table(header, lines)
    trained = "{}x{}".format(*trained_size(result["runs"], rows[0]["model"]))
    caption = (
        f"Top-1 accuracy (%) with `none`, the schemes' own rule, and differences from it in points "
        f"of models trained at {trained} px: mean and 95 % interval over "
        f"{len(result['settings']['seeds'])} seeds, on the first "
        f"{rows[0]['count']:,} test images of {PARTS['fashion'].about}."
    )
    above = (
        "Above the scheme's own rule, by an interval that does not contain zero (chance alone puts "
        "about one in forty there):"
    )
    return f"{table}\n{caption} {origin(result)}.\n\n{above}\n\n" + "\n".join(verdicts) + "\n"


def rows_of(result: Result) -> list[Row]:
    """The rows with rules in a result of `evidence`, of the models that have all seeds."""
    model = operator.itemgetter("backbone", "position")
    runs = [run for run in result["runs"] if "rules" in run]
    seeds = collections.Counter(map(model, runs))
    runs = [run for run in runs if seeds[model(run)] == len(result["settings"]["seeds"])]
    return [about(run) | row for run in runs for row in run["rules"]]


def about(run: dict[str, Any]) -> dict[str, Any]:
    """What the rows of a run of `evidence` have in common, as in a result of `extend`."""
    names = {"model": "backbone", "position": "position", "seed": "seed", "run": "seed"}
    return {name: run[key] for name, key in names.items()}


def cell(values: Sequence[float], rule: str) -> str:
    """The mean of seeds and its interval."""
    if not values:
        return "-"
    mean, half = interval(values)
    sign = "" if rule == "none" else "+"
    return f"{mean:{sign}.1f}" + (f" ± {half:.1f}" if len(values) > 1 else "")
