"""Writes the tables of the documentation: `python -m docs.make_tables`, or `make tables`.

In each of FILES, the text between `<!-- table: NAME -->` and `<!-- end -->` is replaced by the
table that `TABLES[NAME]` creates from the newest results in benchmarks/results and
experiments/results. With --check nothing is written, and a difference is an error.
"""

import ast
import re
import sys
from collections.abc import Callable, Sequence

from benchmarks import machine_code
from benchmarks._runner import Result
from docs.evidence import designs, evidence, ranking, verdicts
from docs.extend import extend
from docs.papers import citation, papers
from docs.results import ROOT, newest, no_result, origin, read_results
from docs.scenes import scenes
from docs.scheme_options import scheme_options
from rope_jax.analysis.costs import scheme_costs
from rope_jax.positions.__main__ import markdown
from rope_jax.text import markdown_table

DOCS = (
    "schemes",
    "choosing",
    "evidence",
    "papers",
    "benchmarks",
    "many_devices",
    "running",
    "citing",
    "segmentation",
)
FILES = ("README.md", "kernels/README.md", *(f"docs/{name}.md" for name in DOCS))
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def digits(results: Sequence[Result]) -> str:
    """Accuracy of the digits recipe by scheme and resolution."""
    if (result := newest(results, "digits")) is None:
        return no_result("experiments digits")

    def percent(row: dict) -> str:
        return f"{100 * row['top1']:.1f}"

    first = [run for run in result["runs"] if run["seed"] == 0]
    sizes = ["{}x{} px".format(*row["resolution"]) for row in first[0]["eval"]]
    rows = [[f"`{run['position']}`", *map(percent, run["eval"])] for run in first]
    again = "".join(
        f"; `{run['position']}` with seed {run['seed']}: {percent(run['eval'][0])}"
        for run in result["runs"]
        if run["seed"] != 0
    )
    count, cores = first[0]["eval"][0]["count"], result["cores"]
    return (
        f"{markdown_table(['position', *sizes], rows)}\n"
        f"Top-1 accuracy (%) on {count} held-out digits; trained at {sizes[0]}, seed 0{again}.\n"
        f"{cores} CPU cores, {origin(result).partition(', ')[2]}.\n"
    )


def gib(count: float) -> str:
    """Bytes in GiB."""
    return f"{count / 2**30:.1f}"


def memory(results: Sequence[Result]) -> str:
    """Memory of training steps."""
    if (result := newest(results, "memory")) is None:
        return no_result("benchmarks memory")
    texts = [f"{markdown_table(x['columns'], x['rows'])}\n{x['note']}\n" for x in result["tables"]]
    return "\n".join([*texts, f"Planned by XLA for {origin(result)}.\n"])


def of_results(benchmark: str) -> Callable[[Sequence[Result]], str]:
    """Tables of the newest results of a benchmark, for each platform (GPUs first) and settings."""

    def render(result: Result) -> str:
        texts = []
        for table in result.get("tables", [result]):
            cells = [
                [x if isinstance(x, str) else f"{x:,.3g}" for x in row] for row in table["rows"]
            ]
            texts += [markdown_table(table["columns"], cells), f"{table.get('note', '')}\n"]
        return "\n".join([*texts[:-1], f"{texts[-1].strip()} {origin(result)}.\n".lstrip()])

    def tables(results: Sequence[Result]) -> str:
        found: dict[str, Result] = {}
        for result in results:
            if result["benchmark"] == benchmark:
                key = str([result["machine"]["platform"], result["settings"]])
                found.setdefault(key, result)
        on_gpu_first = sorted(found.values(), key=lambda x: x["machine"]["platform"] != "gpu")
        return "\n".join(map(render, on_gpu_first)) or no_result(f"benchmarks {benchmark}")

    return tables


def commands(results: Sequence[Result]) -> str:
    """Benchmarks and experiments, with the first sentence of their docstrings."""
    del results
    rows = []
    for folder in ("benchmarks", "experiments"):
        for path in sorted((ROOT / folder).glob("[!_]*.py")):
            text = ast.get_docstring(ast.parse(path.read_text()))
            sentence = text.split("\n\n")[0].replace("\n", " ")
            rows.append([f"`python -m {folder} {path.stem}`", sentence])
    return markdown_table(["command", "measures"], rows)


def faults(results: Sequence[Result]) -> str:
    """Attacks on a run, how often each was tried, and how often the run survived."""
    if (result := newest(results, "faults")) is None:
        return no_result("tests.faults.long")
    kills, corruptions = result["kills"], result["corruptions"]
    signals = len(result["signals"])
    rows = [
        ("`SIGKILL` at a random instant", kills["kills"], kills["kills"]),
        ("a damaged checkpoint", corruptions["corruptions"], corruptions["fell_back"]),
        ("`SIGTERM` in each phase of a run", signals, signals),  # any failure stops the program
    ]
    rows += [(row["attack"], row["tries"], row["survived"]) for row in result.get("attacks", [])]
    cells = [[name, str(tries) if tries else "not run", str(survived) if tries else ""]
             for name, tries, survived in rows]  # fmt: skip
    return f"{markdown_table(['attack', 'tries', 'survived'], cells)}\n{origin(result)}.\n"


def schemes(results: Sequence[Result]) -> str:
    """The positional schemes."""
    del results
    return markdown()


COSTLY = ("ape", "lape(ape)", "rpb", "cpb", "alibi2d", "rope2d", "rope_mixed", "axial_rope")
MODELS = {"ViT-S": "deit3_s16", "Swin-T": "swin_t"}


def costs(results: Sequence[Result]) -> str:
    """Parameters and operations of schemes in whole models, counted from their definitions."""
    del results
    counted = {title: scheme_costs(name, COSTLY, 224) for title, name in MODELS.items()}
    rows = []
    for number, position in enumerate(COSTLY):
        cells = [f"`{position}`"]
        for of_model in counted.values():
            cost = of_model[number]
            share = 100 * cost.operations / cost.multiply_adds
            cells += [
                f"{cost.parameters:,}",
                f"{cost.operations / 1e6:.1f} million ({share:.2f} %)",
            ]
        rows.append(cells)
    header = [f"{title}: {what}" for title in MODELS for what in ("parameters", "operations")]
    text = markdown_table(["scheme", *header], rows)
    models = " and ".join(f"`{name}`" for name in MODELS.values())
    return (
        f"{text}\n{models} at 224 px, per image; in parentheses, the share of the multiply-adds.\n"
    )


TABLES: dict[str, Callable[[Sequence[Result]], str]] = {
    "digits": digits,
    "schemes": schemes,
    "scheme_options": scheme_options,
    "data": of_results("data"),
    "designs": designs,
    "evidence": evidence,
    "verdicts": verdicts,
    "ranking": ranking,
    "scenes": scenes,
    "extend": extend,
    "costs": costs,
    "papers": papers,
    "citation": citation,
    "speed": of_results("speed"),
    "startup": of_results("startup"),
    "cpu": of_results("cpu"),
    "memory": memory,
    "memory_dense": memory_dense,
    "launches": launches,
    "machine_code": machine_codes,
    "commands": commands,
    "faults": faults,
}


def fill(text: str, results: Sequence[Result]) -> str:
    """Replaces every marked table in a text.

    Raises:
        ValueError: if the name of a table is not in TABLES.
    """

    def table(block: re.Match) -> str:
        if block[2] not in TABLES:
            raise ValueError(f"table {block[2]!r} is unknown; use one of {list(TABLES)}")
        return f"{block[1]}{TABLES[block[2]](results)}{block[3]}"

    return BLOCK.sub(table, text)


def main(argv: Sequence[str]) -> None:
    """Writes the tables; with --check, fails if a file is out of date."""
    results, stale = read_results(ROOT), []
    for path in (ROOT / name for name in FILES):
        text = path.read_text()
        if (new := fill(text, results)) != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in argv:
                path.write_text(new)
    if "--check" in argv and stale:
        sys.exit("not up to date (make tables): " + ", ".join(stale))
    print("written: " + ", ".join(stale) if stale else "all tables are up to date")


if __name__ == "__main__":
    main(sys.argv[1:])
