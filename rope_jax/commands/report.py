"""Compares finished runs on one page.

    python -m rope_jax.analysis.report WORKDIR [WORKDIR ...] [--out=FOLDER] [--analyse]

Writes report.html, which needs no other file and no network, its pictures, and comparison.txt. Runs
that differ only in their seed share a row, with the mean and its 95 % confidence interval; so do
the seeds of one workdir.
"""

import pathlib

from rope_jax.analysis.comparison_page import analyse, print_report
from rope_jax.analysis.runs import group_runs, read_runs
from rope_jax.commands.arguments import command_parser
from rope_jax.system.sharding import start_devices


def main(arguments: list[str] | None = None) -> None:
    """Reads the workdirs and writes the report."""
    parser = command_parser("rope_jax.analysis.report", __doc__)
    add, path = parser.add_argument, pathlib.Path
    add("workdirs", nargs="+", type=path, help="of finished runs of rope_jax train")
    add("--out", type=path, help="folder to write to; default: the parent of the first workdir")
    add("--analyse", action="store_true", help="first draw the pictures of each row's first run")
    parsed = parser.parse_args(arguments)
    workdirs = dict.fromkeys(parsed.workdirs)  # a workdir given twice is not a second seed
    with parser.one_line_errors(extra="plot"):
        groups = group_runs([run for workdir in workdirs for run in read_runs(workdir)])
        if parsed.analyse:
            start_devices()
            for group in groups.values():
                analyse(group[0])
        print_report(groups, parsed.out or parsed.workdirs[0].parent)
