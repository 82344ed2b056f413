"""Accuracy at any resolution: `python -m rope_jax.evaluate`, and the end of each training run."""

from rope_jax.evaluate.accuracy import (
    accuracies,
    at_resolution,
    evaluate_files,
    evaluate_split,
    evaluate_state,
    planned_rows,
    protocol,
    resolutions,
)
from rope_jax.evaluate.results import (
    add_evaluation,
    main_score,
    read_evaluations,
    read_results,
    results_table,
    rows_by_line,
    same_rows,
    usable_results,
    write_results,
)

__all__ = [
    "accuracies",
    "add_evaluation",
    "at_resolution",
    "evaluate_files",
    "evaluate_split",
    "evaluate_state",
    "main_score",
    "planned_rows",
    "protocol",
    "read_evaluations",
    "read_results",
    "resolutions",
    "results_table",
    "rows_by_line",
    "same_rows",
    "usable_results",
    "write_results",
]
