"""Tables of the experiment `scenes`: mIoU by scheme and size, and differences from APE."""

from collections.abc import Sequence

from benchmarks._runner import Result
from docs.results import newest, no_result, origin
from experiments._claims import interval
from experiments.scenes import BASE, differences, scores
from rope_jax.text import markdown_table


def scenes(results: Sequence[Result]) -> str:
    """mIoU of every scheme at every size, and its differences from APE."""
    if (result := newest(results, "scenes")) is None:
        return no_result("experiments scenes")
    runs, means, gains, sizes = result["runs"], [], [], []
    for position in result["settings"]["schemes"]:
        by_seed = list(scores(runs, position).values())
        if len(by_seed) > 1:
            sizes = list(by_seed[0])
            found = [interval([one[size] for one in by_seed]) for size in sizes]
            means.append([f"`{position}`", *(f"{mean:.1f} ± {half:.1f}" for mean, half in found)])
        if of_scheme := differences(runs, position):
            cells = [f"{x.mean:+.1f} ± {x.half_width:.1f}, {x.verdict}" for x in of_scheme]
            gains.append([f"`{position}`", *cells])
    named = ["{}x{} px".format(*size) for size in sizes]
    about = "mIoU (%) on 200 test scenes, mean and 95 % interval over seeds; trained at the first "
    about += "size." + ("" if result["complete"] else " Not all runs are finished.")
    if flags := result["settings"]["flags"]:
        about += f" Flags of all runs: `{' '.join(flags)}`."
    text = f"{markdown_table(['position', *named], means)}\n{about} {origin(result)}.\n"
    header = ["position", *named, "more so at larger sizes"]
    return f"{text}\nDifferences from `{BASE}`, in points:\n\n{markdown_table(header, gains)}"
