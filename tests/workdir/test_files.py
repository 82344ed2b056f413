"""Files of a workdir are complete or absent, also with several writers."""

import concurrent.futures
import json
import os

import pytest

import rope_jax.run
from rope_jax.config import ConfigError
from rope_jax.evaluate import add_evaluation, read_evaluations
from rope_jax.files import locked, update_file, write_file
from tests.training.recipe import tiny


def test_writers_of_one_file_wait_for_each_other(tmp_path):
    path = tmp_path / "evaluations.json"
    rows = [{"asked": number % 20, "number": number} for number in range(40)]
    # Each thread opens files of its own, as processes do.
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda row: add_evaluation(path, row), rows))
    assert sorted(row["asked"] for row in read_evaluations(path)) == list(range(20))
    assert [p.name for p in tmp_path.iterdir()] == ["evaluations.json"]


def test_a_file_is_not_touched_by_a_change_that_fails(tmp_path):
    path = tmp_path / "results.json"
    write_file(path, "old")
    with pytest.raises(json.JSONDecodeError):
        update_file(path, lambda: json.loads(path.read_text()))
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("results.json", "old")]


def test_what_a_killed_writer_has_left_is_replaced(tmp_path):
    (tmp_path / "results.json.tmp").write_text(1000 * "half of it")
    write_file(tmp_path / "results.json", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("results.json", "new")]


def test_a_run_that_is_training_is_not_evaluated_beside_that(tmp_path):
    """Both would write its results."""
    (tmp_path / "checkpoints").mkdir()
    with (
        locked(tmp_path),
        pytest.raises(
            ConfigError,
            match=rf"is in use by process {os.getpid()} on .*: wait for it.*\[--workdir\]",
        ),
    ):
        rope_jax.run.evaluate_newest(tiny(), tmp_path)
