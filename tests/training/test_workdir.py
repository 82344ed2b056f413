"""Files of a workdir are there whole or not at all, whoever else writes them or holds the folder."""

import concurrent.futures
import json
import os

import pytest

from rope_jax import train
from rope_jax.config import ConfigError
from rope_jax.evaluate import add_evaluation, read_evaluations
from rope_jax.workdir import locked, update_file, write_file

from .recipe import tiny


def test_writers_of_one_file_wait_for_each_other(tmp_path):
    path = tmp_path / "evaluations.json"
    with concurrent.futures.ThreadPoolExecutor(8) as threads:  # each opens files of its own, as processes do
        list(threads.map(lambda number: add_evaluation(path, {"asked": number % 40, "number": number}), range(80)))
    assert sorted(row["asked"] for row in read_evaluations(path)) == list(range(40))  # none lost, none twice
    assert [p.name for p in tmp_path.iterdir()] == ["evaluations.json"]


def test_a_file_is_not_touched_by_a_change_that_fails(tmp_path):
    path = tmp_path / "results.json"
    write_file(path, "old")
    with pytest.raises(json.JSONDecodeError):
        update_file(path, json.loads)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("results.json", "old")]


def test_what_a_killed_writer_has_left_is_replaced(tmp_path):
    (tmp_path / "results.json.tmp").write_text(1000 * "half of it")
    write_file(tmp_path / "results.json", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("results.json", "new")]


def test_a_run_that_is_training_is_not_evaluated_beside_that(tmp_path):
    """Both would write its results; `python -m rope_jax.evaluate`, whose rows are its own, takes no part in this."""
    (tmp_path / "checkpoints").mkdir()
    with locked(tmp_path), pytest.raises(ConfigError, match=rf"is in use by process {os.getpid()} on .*: wait for it.*\[--workdir\]"):
        train.evaluate_newest(tiny(), tmp_path)
