"""Tables of the experiment `evidence`: accuracies, and the outcome of the papers' claims."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from benchmarks._runner import Result
from docs.results import newest, no_result, origin
from experiments._claims import (
    MARGIN,
    SEEN,
    Claim,
    accuracies,
    interval,
    judge,
    sides,
    trained_size,
)
from experiments._claims import claims as claims_of
from experiments._parts import PARTS, RULE_IMAGES, Part
from rope_jax.text import markdown_table


def evidence(results: Sequence[Result]) -> str:
    """Accuracies by backbone, scheme and resolution, and verdicts on the claims, of all parts."""
    texts = []
    for name, part in PARTS.items():
        if (result := newest(results, "evidence", part=name)) is None:
            texts.append(f"Part `{name}`. {no_result(f'experiments evidence {name}')}")
            continue
        about = (
            f"Part `{name}`, {part.about}. Top-1 accuracy (%), mean and 95 % interval over seeds."
        )
        if flags := result["settings"]["flags"]:
            about += f" Flags of all runs: `{' '.join(flags)}`."
        if not result["complete"]:
            all_runs = len(part.models) * len(result["settings"]["seeds"])
            about += f" {len(result['runs'])} of {all_runs} runs are finished."
        about += f" {origin(result)}.\n"
        texts.append("\n".join([about, accuracy_table(result), claims_table(name, result)]))
    return "\n".join(texts)


def designs(results: Sequence[Result]) -> str:
    """What is trained to test the claims on Fashion-MNIST, and what would count as shown."""
    del results
    part, rows, sources = PARTS["fashion"], [], {}
    for group in comparisons(claims_of("fashion")):
        at = ", ".join(str(claim.resolution or "as trained") for claim in group)
        source = group[0].source
        rows.append([sides(dataclasses.replace(group[0], resolution=None)), at, source])
        sources[source] = [source, SEEN[source]]
    texts = [
        markdown_table(["claim", "at, px", "source"], rows),
        _rule(part),
        _trained(part),
        markdown_table(["source", "what it saw"], list(sources.values())),
    ]
    return "\n\n".join(text.rstrip() for text in texts) + "\n"


def _rule(part: Part) -> str:
    """What counts as shown."""
    return (
        f"Seeds {part.seeds[0]} to {part.seeds[-1]} of each model. A claim of being above is shown "
        "if the 95 % interval of the difference (Student's t over seeds) lies above zero, and "
        "refuted if it lies below zero; a claim of being as good likewise, with "
        f"-{MARGIN} points in place of zero. Otherwise it is not shown."
    )


def _trained(part: Part) -> str:
    """The models and how they are trained, in the order of the runs."""
    found = {backbone: part.design(backbone) for backbone, _ in part.models}
    shared = dict(set.intersection(*(set(_items(x)) for x in found.values())))
    rows = [
        [f"`{backbone}`", ", ".join(f"`{key}={x}`" for key, x in _items(own) if key not in shared)]
        for backbone, own in found.items()
    ]
    common = ", ".join(f"`{key}={value}`" for key, value in sorted(shared.items()))
    text = f"{markdown_table(['model', 'settings'], rows)}\nAll: {common}."
    if part.extended:
        schemes = ", ".join(f"`{position}`" for _, position in part.extended)
        text += f" Models with {schemes} are also evaluated with [every rule for other sizes]"
        text += (
            f"(schemes.md#beyond-the-size-of-training), on the first {RULE_IMAGES:,} test images."
        )
    return text


def _items(design: dict) -> list[tuple[str, str]]:
    return [(key, str(value)) for key, value in design.items()]


def accuracy_table(result: Result) -> str:
    """Accuracy of every model of a part, at the training resolution and others."""
    rows = []
    for model in PARTS[result["settings"]["part"]].models:
        runs = [x for x in result["runs"] if (x["backbone"], x["position"]) == model]
        if not runs:
            continue
        cells = []
        trained, *others = (row["resolution"][0] for row in runs[0]["eval"])
        for side in (None, *others):
            mean, half = interval(list(accuracies(runs, *model, side).values()))
            cells.append(f"{mean:.1f}" + ("" if math.isnan(half) else f" ± {half:.1f}"))
        elsewhere = ", ".join(f"{x}: {cell}" for x, cell in zip(others, cells[1:], strict=True))
        backbone, position = model
        names = [f"`{backbone}`", f"`{position or 'its own'}`", str(len(runs))]
        rows.append([*names, f"{cells[0]} ({trained} px)", elsewhere])
    header = ["backbone", "position", "seeds", "at the training resolution", "at other sides, px"]
    return markdown_table(header, rows)


def comparisons(claims: Iterable[Claim]) -> list[list[Claim]]:
    """Claims in groups that differ in the resolution only."""
    alike = lambda claim: dataclasses.replace(claim, resolution=None)
    return [list(group) for _, group in itertools.groupby(claims, alike)]


def claims_table(
    part: str, result: Result, keep: Callable[[Claim], bool] = lambda claim: True
) -> str:
    """The outcome of the papers' claims, one row for each with all its resolutions.

    There is no verdict before all seeds are there.
    """
    rows, verdicts, wanted = [], collections.Counter(), len(result["settings"]["seeds"])
    for group in comparisons(filter(keep, claims_of(part))):
        judged = [(claim, found) for claim in group if (found := judge(claim, result["runs"]))]
        if judged:
            cells = []
            for claim, found in judged:
                side = f"{claim.resolution} px: " if claim.resolution else "as trained: "
                text = f"{found.seeds} of {wanted} seeds"
                if found.seeds == wanted:
                    text = str(found)
                    verdicts[found.verdict] += 1
                cells.append(f"{side if len(judged) > 1 or claim.resolution else ''}{text}")
            what = sides(dataclasses.replace(judged[0][0], resolution=None))
            rows.append([what, group[0].source, "<br>".join(cells)])
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    table = markdown_table(["claim", "source", "difference in points, and verdict"], rows)
    return f"{table}\nOf {verdicts.total()} comparisons: {counts}.\n" if verdicts else table


def verdicts(results: Sequence[Result]) -> str:
    """The claims on Fashion-MNIST by their verdicts; those that lack seeds last."""
    if (result := newest(results, "evidence", part="fashion")) is None:
        return no_result("experiments evidence fashion")
    found, wanted = collections.defaultdict(list), len(result["settings"]["seeds"])
    for group in comparisons(claims_of("fashion")):
        places = collections.defaultdict(list)
        for claim in group:
            verdict = judge(claim, result["runs"], wanted)
            place = " as trained" if len(group) > 1 else ""
            if claim.resolution:
                place = f" at {claim.resolution} px"
            if verdict:
                place += f" ({verdict.difference:+.1f} ± {verdict.half_width:.1f})"
            places[verdict.verdict if verdict else "not finished"].append(place)
        what = sides(dataclasses.replace(group[0], resolution=None))
        for name, there in places.items():
            found[name].append(what + ",".join(there))
    names = ("shown", "refuted", "not shown", "not finished")
    lines = [
        f"- **{name.capitalize()}**: {'; '.join(found[name])}." for name in names if found[name]
    ]
    return "\n".join(lines) + "\n"


RANKED = (None, 20, 24, 32, 40)  # sides in pixels; None is that of training


def ranking(results: Sequence[Result]) -> str:
    """Accuracies of the small ViT with every scheme that has all seeds, best first."""
    if (result := newest(results, "evidence", part="fashion")) is None:
        return no_result("experiments evidence fashion")
    rows, wanted = {}, len(result["settings"]["seeds"])
    for backbone, position in PARTS["fashion"].models:
        if backbone != "vit":
            continue
        found = [accuracies(result["runs"], backbone, position, side).values() for side in RANKED]
        if all(len(values) == wanted for values in found):
            rows[position] = [interval(list(values)) for values in found]
    ordered = sorted(rows.items(), key=lambda row: row[1][0], reverse=True)
    cells = [
        [f"`{position}`", *(f"{mean:.1f} ± {half:.1f}" for mean, half in means)]
        for position, means in ordered
    ]
    trained, _ = trained_size(result["runs"], "vit")
    header = ["position", f"{trained} px, as trained", *(f"{side} px" for side in RANKED[1:])]
    about = f"Top-1 accuracy (%) of a small ViT on {PARTS['fashion'].about}, mean and 95 % interval"
    return f"{markdown_table(header, cells)}\n{about} over {wanted} seeds. {origin(result)}.\n"
