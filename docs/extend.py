"""Tables of the experiment `extend`: what each rule for rotations does at other sizes."""

from collections.abc import Sequence

from benchmarks._runner import Result
from docs.results import newest, no_result, origin
from experiments._claims import interval
from experiments.extend import differences, helping
from rope_jax.text import markdown_table


def extend(results: Sequence[Result]) -> str:
    """Scores of every scheme at every scale, the differences of the rules, and which help where."""
    if (result := newest(results, "extend")) is None:
        return no_result("experiments extend RUN...")
    rows, lines, verdicts = result["rows"], [], []
    scales = sorted({row["scale"] for row in rows})
    for model, position in dict.fromkeys((row["model"], row["position"]) for row in rows):
        for rule in dict.fromkeys(row["rule"] for row in rows):
            by_scale = [differences(rows, model, position, rule, scale) for scale in scales]
            if any(by_scale):
                names = [f"`{model}`", f"`{position}`", f"`{rule}`"]
                lines.append([*names, *(cell(values, rule) for values in by_scale)])
        found = [
            f"at {scale:g} times the size, `{'`, `'.join(best)}`"
            for scale, best in helping(rows, model, position).items()
        ]
        if any(row["rule"] != "none" for row in rows if row["position"] == position):
            verdicts.append(f"- `{model}` with `{position}`: {'; '.join(found) or 'none is'}.")
    header = ["model", "position", "rule", *(f"{scale:g} x" for scale in scales)]
    table = markdown_table(header, lines)
    about = (
        "Scores (%) at multiples of the size of training with `none`, the scheme's own rule, and"
    )
    about += " differences from it in points; mean and 95 % interval over seeds."
    above = "Above the scheme's own rule, by an interval that does not contain zero:"
    return f"{table}\n{about} {origin(result)}.\n\n{above}\n\n" + "\n".join(verdicts) + "\n"


def cell(values: Sequence[float], rule: str) -> str:
    """The mean of seeds and its interval."""
    if not values:
        return "-"
    mean, half = interval(values)
    sign = "" if rule == "none" else "+"
    return f"{mean:{sign}.1f}" + (f" ± {half:.1f}" if len(values) > 1 else "")
