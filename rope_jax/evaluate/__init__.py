"""Accuracy at any resolution: `python -m rope_jax.evaluate`, and the end of each training run."""

from rope_jax.evaluate.accuracy import (
    at_any_resolution,
    at_resolution,
    draw_predictions,
    evaluate_state,
    planned_rows,
    protocols,
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
from rope_jax.tasks.evaluator import Evaluator

__all__ = [
    "Evaluator",
    "add_evaluation",
    "at_any_resolution",
    "at_resolution",
    "draw_predictions",
    "evaluate_state",
    "main_score",
    "planned_rows",
    "protocols",
    "read_evaluations",
    "read_results",
    "results_table",
    "rows_by_line",
    "same_rows",
    "usable_results",
    "write_results",
]
