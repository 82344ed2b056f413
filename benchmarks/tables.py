"""Writes the tables of the READMEs from the results: `python -m benchmarks tables`, or `make tables`.

What stands between `<!-- table: NAME -->` and `<!-- end -->` in one of FILES is replaced by what TABLES[NAME] makes of the newest results
in benchmarks/results (the table of schemes: of what they say of themselves). A figure without a result reads "not measured". With --check
nothing is written, and a difference is an error.
"""

import argparse
import ast
import collections
import dataclasses
import itertools
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable

from benchmarks._goals import GOALS, Goal
from rope_jax.positions.table import markdown

ROOT = pathlib.Path(__file__).parents[1]
FILES = ("README.md", "kernels/README.md", "benchmarks/README.md", "docs/many_devices.md")
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "not measured"

Result = dict


def read_results(folder: pathlib.Path = ROOT / "benchmarks" / "results") -> list[Result]:
    """All results, the newest first; each with the name of its file."""
    results = [json.loads(path.read_text()) | {"file": path.name} for path in sorted(folder.glob("*.json"))]
    return sorted(results, key=lambda result: result["date"], reverse=True)


def newest(results: list[Result], benchmark: str, platform: str | None = None, **settings: str) -> Result | None:
    """The newest result of a benchmark, of those from a platform or with settings where some are named."""
    for result in results:
        fits = platform in (None, result["machine"]["platform"]) and settings.items() <= result["settings"].items()
        if result["benchmark"] == benchmark and fits:
            return result
    return None


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


def origin(result: Result) -> str:
    """Machine, versions, date and file of a result, as the end of a sentence."""
    return f"{result['machine']['device']}, jax {result['versions']['jax']}, {result['date'][:10]}, `benchmarks/results/{result['file']}`"


def digits(results: list[Result]) -> str:
    """Accuracy of the demo by scheme and resolution."""
    if (result := newest(results, "digits")) is None:
        return f"{NOT_MEASURED} (`python -m benchmarks digits`).\n"
    percent = lambda evaluation: f"{100 * evaluation['top1']:.1f}"
    first = [run for run in result["runs"] if run["seed"] == 0]
    sizes = ["{}x{} px".format(*evaluation["resolution"]) for evaluation in first[0]["eval"]]
    rows = [[f"`{run['position']}`", *map(percent, run["eval"])] for run in first]
    again = "".join(f"; `{x['position']}` with seed {x['seed']}: {percent(x['eval'][0])}" for x in result["runs"] if x["seed"] != 0)
    count, cores, version = first[0]["eval"][0]["count"], result["cores"], result["versions"]["jax"]
    return (
        table(["position", *sizes], rows)
        + f"\nTop-1 accuracy (%) on {count} held-out digits; trained at {sizes[0]} with seed 0{again}.\n{cores} CPU cores, jax {version}, "
        + f"{result['date'][:10]}, `benchmarks/results/{result['file']}`.\n"
    )


def rotary(results: list[Result]) -> str:
    """How the rotary kernels compare with XLA on a GPU."""
    if (result := newest(results, "rotary", "gpu")) is None:
        return f"Time of the rotation on a GPU: {NOT_MEASURED} (`python -m benchmarks rotary`).\n"
    from benchmarks.rotary import ratio_table

    limits = result["limits"]
    header = ["precision (features-theta)", "direction", "cache", "time ratio", "sizes", "geometric mean", "least", "most"]
    return (
        table(header, [list(row) for row in ratio_table(result)])
        + f"\nA launch takes {limits['launch_us']:.2f} us, an empty kernel {limits['kernel_launch_us']:.2f} us, a copy moves "
        + f"{limits['copy_gb_per_s']:,.0f} GB/s. {origin(result)}.\n"
    )


def scan(results: list[Result]) -> str:
    """Compile and step time with and without a scan over the layers."""
    if (result := newest(results, "scan")) is None:
        return f"{NOT_MEASURED} (`python -m benchmarks scan`).\n"
    from benchmarks.scan import Row
    from benchmarks.scan import table as rows_table

    settings = result["settings"]
    return (
        rows_table([Row(**row) for row in result["rows"]])
        + f"\n\nTraining step of `{settings['model']}`, batch {settings['batch']}, {settings['image_size']} px. {origin(result)}.\n"
    )


def neighborhood(results: list[Result]) -> str:
    """Neighbourhood attention in XLA against a gather."""
    fitting = [result for result in results if result["benchmark"] == "neighborhood"]
    if not fitting:
        return f"{NOT_MEASURED} (`python -m benchmarks neighborhood`).\n"
    rows = []
    for result in fitting:
        settings = result["settings"]
        shape = f"{settings['size']}x{settings['size']}, K = {settings['kernel']}, batch {settings['batch']}"
        rows.append([shape, f"{result['time_ratio']:.1f}", f"{result['memory_ratio']:.1f}", origin(result)])
    return table(["map", "time, gathered / tiled", "memory, gathered / tiled", "measured on"], rows)


def evidence(results: list[Result]) -> str:
    """Accuracies by backbone, scheme and resolution, and what the papers' claims become at that scale."""
    from benchmarks.evidence import PARTS

    texts = []
    for name, part in PARTS.items():
        if (result := newest(results, "evidence", part=name)) is None:
            texts.append(f"Part `{name}`: {NOT_MEASURED} (`python -m benchmarks evidence {name}`).\n")
            continue
        flags = f" Flags of all runs: `{' '.join(result['settings']['flags'])}`." if result["settings"]["flags"] else ""
        finished = "" if result["complete"] else " Not all runs are finished."
        about = f"Part `{name}`, {part.about}. Top-1 accuracy (%), mean and 95 % interval over seeds.{flags}{finished} {origin(result)}.\n"
        texts.append("\n".join([about, accuracy_table(result), claims_table(name, result)]))
    return "\n".join(texts)


def accuracy_table(result: Result) -> str:
    """What each (backbone, scheme) of a result of `evidence` reached: at the training resolution, and at others."""
    from benchmarks.evidence import PARTS, accuracies, interval

    rows = []
    for backbone, position in PARTS[result["settings"]["part"]].models:
        of_one = [x for x in result["runs"] if (x["backbone"], x["position"]) == (backbone, position)]
        if of_one:
            at = [None, *(row["resolution"][0] for row in of_one[0]["eval"][1:])]
            found = [interval(list(accuracies(of_one, backbone, position, size).values())) for size in at]
            trained, *others = [f"{mean:.1f}" + ("" if math.isnan(half) else f" ± {half:.1f}") for mean, half in found]
            elsewhere = ", ".join(f"{size}: {value}" for size, value in zip(at[1:], others, strict=True))
            side = of_one[0]["eval"][0]["resolution"][0]
            rows.append([f"`{backbone}`", f"`{position or 'its own'}`", str(len(of_one)), f"{trained} ({side} px)", elsewhere])
    return table(["backbone", "position", "seeds", "where it was trained", "at other sides, px"], rows)


def claims_table(part: str, result: Result) -> str:
    """What became of the papers' claims in a result of `evidence`: one row for each, with all its resolutions."""
    from benchmarks.evidence import claims, judge, sides

    rows = []
    alike = lambda claim: (claim.source, claim.better, claim.worse, claim.equal)
    for (source, *_), group in itertools.groupby(claims(part), alike):
        judged = [(claim, found) for claim in group if (found := judge(claim, result["runs"]))]
        if judged:
            several = len(judged) > 1
            at = lambda side, several=several: f"{side} px: " if side else "where trained: " if several else ""
            cells = [f"{at(claim.resolution)}{found.difference:+.1f} ± {found.half_width:.1f}, {found.verdict}" for claim, found in judged]
            rows.append([sides(dataclasses.replace(judged[0][0], resolution=None)), source, "<br>".join(cells)])
    return table(["claim", "source", "difference in points, and what it says"], rows)


def claims(results: list[Result]) -> str:
    """The claims about the ViT of the evidence on a CPU."""
    if (result := newest(results, "evidence", part="vit")) is None:
        return f"{NOT_MEASURED} (`python -m benchmarks evidence vit`).\n"
    from benchmarks.evidence import claims, judge

    verdicts = collections.Counter(found.verdict for claim in claims("vit") if (found := judge(claim, result["runs"])))
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    seeds = len({run["seed"] for run in result["runs"]})
    return claims_table("vit", result) + f"\nOf {verdicts.total()} comparisons: {counts}; {seeds} seeds. {origin(result)}.\n"


def pictures(results: list[Result]) -> str:
    """The pictures of docs/images that there are results for."""
    from benchmarks.pictures import PICTURES, result_of

    there = [picture for picture in PICTURES.values() if result_of(picture, results)]
    if not there:
        return f"{NOT_MEASURED} (`python -m benchmarks evidence vit`).\n"
    return "\n".join(f"![{picture.says}](docs/images/{picture.file})\n" for picture in there)


def model_path(results: list[Result]) -> str:
    """Launches and bytes between the projection and cuDNN."""
    if (result := newest(results, "model_path")) is None:
        return f"{NOT_MEASURED} (`python -m benchmarks model_path`).\n"
    columns = [(pairs, trained) for pairs in result["settings"]["pairs"] for trained in ("", "fixed", "learned")]
    names = {"": "forward", "fixed": "training", "learned": "training, learned frequencies"}
    figures = {(row["form"], row["pairs"], row["trained"]): row for row in result["rows"]}
    timed = any("microseconds" in row for row in result["rows"])

    def cell(row: dict) -> str:
        return f"{row['launches']} / {row['units']:.1f}" + (f" / {row['microseconds']:.0f} us" if timed else "")

    rows = [
        [f"`{form}`", *(cell(figures[form, *column]) for column in columns)]
        for form in dict.fromkeys(row["form"] for row in result["rows"])
    ]
    header = ["form", *(f"R = {pairs}: {names[trained]}" for pairs, trained in columns)]
    where = "measured" if timed else f"counted, {NOT_MEASURED} on a GPU"
    return (
        table(header, rows)
        + f"\nLaunches / units{' / time of the layer' if timed else ''}; {where}. Compiled for {result['compiled_for']}, jax "
        + f"{result['versions']['jax']}, {result['date'][:10]}, `benchmarks/results/{result['file']}`.\n"
    )


def memory(results: list[Result]) -> str:
    """What training steps hold on a GPU, which batch fits, and what attention's kernels save."""
    if (result := newest(results, "memory")) is None:
        return f"{NOT_MEASURED} (`python -m benchmarks memory`).\n"
    gib = lambda number: f"{number / 2**30:.1f}"
    names = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    rows = []
    for row in result["rows"]:
        tell = ", ".join(f"{row['collectives'][name]} {name}" for name in names if name in row["collectives"])
        most = max(row["rest_bytes"], key=int)
        figures = [gib(row["state_bytes"]), gib(row["rest_bytes"][most]), str(row["largest_batch"]), tell]
        rows.append([row["model"], str(row["gpus"]), str(row["fsdp"]), *figures])
    header = ["model", "GPUs", "fsdp", "state, GiB", f"the rest at {most} images a GPU, GiB", "largest batch a GPU", "collectives"]
    text = table(header, rows)
    if pairs := result["against_xla"]:
        cells = [[x["model"], gib(x["kernels_bytes"]), gib(x["xla_bytes"]), f"{x['xla_bytes'] / x['kernels_bytes']:.2f}"] for x in pairs]
        header = ["model", "with the attention kernels, GiB", "with XLA's attention, GiB", "ratio"]
        text += f"\nThe rest at {pairs[0]['batch']} images a GPU, by implementation of attention:\n\n" + table(header, cells)
    if layers := result.get("attention"):
        text += f"\nAttention alone, a layer at {layers[0]['batch']} images, forward and backward, with the kernels / with XLA's:\n\n"
        both = lambda x, what: [x[name][what] / 2**20 for name in ("kernels", "xla")]
        figures = lambda kernels, xla: [f"{kernels:,.0f} / {xla:,.0f}", f"{xla / kernels:.1f}"]
        cells = []
        for model in dict.fromkeys(x["model"] for x in layers):
            of_model = [x for x in layers if x["model"] == model]
            for x in of_model:
                about = [model, str(x["layers"]), "x".join(map(str, x["places"])), f"`{x['pattern']}`"]
                cells.append([*about, *figures(*both(x, "saved")), figures(*both(x, "temporary"))[0]])
            saved = [sum(x["layers"] * both(x, "saved")[i] for x in of_model) for i in range(2)]
            cells.append([model, str(sum(x["layers"] for x in of_model)), "all", "", *figures(*saved), ""])
        header = ["model", "layers", "map", "attention", "saved for the backward pass, MiB", "ratio", "temporary, MiB"]
        text += table(header, cells) + "\nNearly all that the kernels save is q, k, v and the output themselves.\n"
    return text + f"\nPlanned by XLA, not measured on a GPU. {origin(result)}.\n"


def goals(results: list[Result]) -> str:
    """What the project aims at, and where it stands."""
    rows = []
    for goal in GOALS:
        result = measured(goal, results)
        where = ["", "", ""]
        if result:
            machine = f"{result['machine']['device']}, jax {result['versions']['jax']}"
            where = [result["date"][:10], machine, f"`python -m benchmarks {result['benchmark']}`"]
        rows.append([goal.name, goal.what, goal.floor, goal.goal, goal.moonshot, goal.limit, reached(goal, result), *where])
    return table(["", "what", "floor", "goal", "moonshot", "limit", "measured", "date", "machine, versions", "command"], rows)


def speed(results: list[Result]) -> str:
    """The goals that say most of the project's speed."""
    asked = [(goal, measured(goal, results)) for goal in GOALS if goal.name in ("K1", "A1", "A3", "A5", "M1", "M2", "M4", "T1", "S2")]
    rows = [[goal.what, goal.goal, reached(goal, result)] for goal, result in asked]
    origins = dict.fromkeys(f"{origin(result)}.\n" for _, result in asked if result)
    return table(["ratio", "goal", "measured"], rows) + "".join(f"\n{each}" for each in origins)


def measured(goal: Goal, results: list[Result]) -> Result | None:
    """The newest result that has a goal."""
    return next((x for x in results if goal.name in x.get("goals", {})), None)


def reached(goal: Goal, result: Result | None) -> str:
    """What was measured of a goal."""
    if result is None:
        return NOT_MEASURED
    value, spread = result["goals"][goal.name], ""
    if "each" in value:  # of few models, which may have floors of their own
        spread = f" ({'; '.join(f'{of}: {one:.2f}' for of, one in value['each'].items())})"
    elif "count" in value:
        spread = f" ({value['least']:.2f} to {value['most']:.2f}, {value['count']} sizes)"
    slower = f" (steps {value['slower_percent']:+.1f} %)" if "slower_percent" in value else ""
    return f"**{value['value']:.2f}**{spread}{slower}"


def models(results: list[Result]) -> str:
    """Images per second of whole models: of every platform the newest result of the same programs, or of a table of the thesis."""
    from benchmarks.models import table as of_models

    return _each(results, "models", of_models, "programs", "table")


def startup(results: list[Result]) -> str:
    """Seconds to compile and to the first step, of the newest result of every platform."""
    from benchmarks.startup import table as of_startup

    return _each(results, "startup", of_startup)


def _each(results: list[Result], benchmark: str, text: Callable[[Result], str], *names: str) -> str:
    """A benchmark's own text about its newest results: one for each platform, GPUs first, and each value of the settings `names`."""
    found: dict[str, Result] = {}
    for result in results:
        if result["benchmark"] == benchmark:
            found.setdefault(str([result["machine"]["platform"], *(result["settings"][name] for name in names)]), result)
    newest_ones = sorted(found.values(), key=lambda result: result["machine"]["platform"] != "gpu")
    texts = [f"{text(result).rstrip()}\n\n{origin(result)}.\n" for result in newest_ones]
    return "\n".join(texts) or f"{NOT_MEASURED} (`python -m benchmarks {benchmark}`).\n"


def files(results: list[Result]) -> str:
    """What lies in benchmarks/results."""
    rows = [
        [f"`{x['file']}`", f"`{x['benchmark']}`", x["date"][:10], x["machine"]["device"], f"jax {x['versions']['jax']}"] for x in results
    ]
    return table(["file", "benchmark", "date", "machine", "versions"], rows)


def benchmarks(results: list[Result]) -> str:
    """The benchmarks there are, by the first sentence of what they say of themselves."""
    del results
    paths = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if not path.stem.startswith("_")]
    sentences = {path.stem: ast.get_docstring(ast.parse(path.read_text())).split("\n\n")[0].replace("\n", " ") for path in paths}
    return table(["name", "what"], [[f"`{name}`", sentence] for name, sentence in sentences.items()])


def data(results: list[Result]) -> str:
    """Images per second of the loader."""
    if (result := newest(results, "data")) is None:
        return f"{NOT_MEASURED} (`python -m benchmarks data`).\n"
    rows = [[x["way"], f"{x['images_per_cpu_second']:,.0f}", f"{x['of_pillow']:.2f}"] for x in result["rows"]]
    about, size = result["photographs"], result["settings"]["size"][0]
    return (
        table(["way", "images/s and core", "of Pillow's decoding"], rows)
        + f"\n{about['images']} photographs of {about['mean_pixels'] / 1000:.0f} thousand pixels on average, to {size} px. "
        + f"{origin(result)}.\n"
    )


TABLES: dict[str, Callable[[list[Result]], str]] = {
    "digits": digits,
    "schemes": lambda results: markdown(),
    "rotary": rotary,
    "model_path": model_path,
    "scan": scan,
    "neighborhood": neighborhood,
    "data": data,
    "evidence": evidence,
    "claims": claims,
    "pictures": pictures,
    "models": models,
    "startup": startup,
    "speed": speed,
    "memory": memory,
    "goals": goals,
    "benchmarks": benchmarks,
    "files": files,
}


def fill(text: str, results: list[Result]) -> str:
    """The text with every marked table made anew.

    Raises:
        ValueError: a table has a name that TABLES does not have.
    """

    def made(block: re.Match) -> str:
        if block[2] not in TABLES:
            raise ValueError(f"table {block[2]!r} is unknown; use one of {list(TABLES)}")
        return f"{block[1]}{TABLES[block[2]](results)}{block[3]}"

    return BLOCK.sub(made, text)


def main(argv: list[str]) -> None:
    """Writes the tables, or says which files disagree with the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with an error where a table is not up to date")
    args = parser.parse_args(argv)
    results, stale = read_results(), []
    for path in (ROOT / name for name in FILES):
        text = path.read_text()
        if (new := fill(text, results)) != text:
            stale.append(str(path.relative_to(ROOT)))
            if not args.check:
                path.write_text(new)
    print("written: " + ", ".join(stale) if stale else "all tables are up to date")
    if args.check and stale:
        sys.exit("not up to date (make tables): " + ", ".join(stale))
