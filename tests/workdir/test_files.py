"""Files of a workdir are complete or absent, also with several writers."""

import concurrent.futures
import contextlib
import errno
import json
import os
import shutil

import pytest

import rope_jax.run
from rope_jax.config import ConfigError
from rope_jax.evaluate import add_evaluation, read_evaluations
from rope_jax.files import (
    locked,
    naming,
    read_json,
    read_regular,
    set_aside,
    update_file,
    write_file,
)
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


def make(path, kind):
    """Something else than a regular file."""
    if kind == "folder":
        path.mkdir()
        (path / "inside").write_text("x")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to(path.name)


KINDS = ["folder", "pipe", "device", "loop of links"]


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_read(tmp_path, kind):
    """A pipe would wait for its writer, and a device has no end."""
    make(tmp_path / "file", kind)
    with pytest.raises(ValueError, match=rf"file is a .*{kind}.*, not a regular file"):
        read_regular(tmp_path / "file", at_most=10)
    with pytest.raises(ValueError, match="not a regular file"):
        read_json(tmp_path / "file")


def test_a_file_is_read_up_to_a_size(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)  # a hole: a terabyte on no disk
    with pytest.raises(ValueError, match=r"file has 1,099,511,627,776 bytes; allowed are 10"):
        read_regular(tmp_path / "file", at_most=10)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b'{"step": 1'])
def test_json_that_is_damaged_is_one_kind_of_error(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match="file is not JSON"):
        read_json(tmp_path / "file")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["accuracy.png", "accuracy.png.tmp"])
def test_what_is_in_the_way_of_a_file_is_set_aside(tmp_path, kind, name, capsys):
    make(tmp_path / name, kind)
    for content in ("one", "two"):
        write_file(tmp_path / "accuracy.png", content)
    assert (tmp_path / "accuracy.png").read_text() == "two"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["accuracy.png", f"{name}.damaged"]
    assert f"It is kept as {name}.damaged" in capsys.readouterr().err


def test_what_is_set_aside_replaces_nothing(tmp_path):
    for number in range(3):
        (tmp_path / "a").write_text(str(number))
        set_aside(tmp_path / "a", "it is damaged")
    kept = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert kept == {"a.damaged": "0", "a.damaged.2": "1", "a.damaged.3": "2"}


def test_a_lock_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with (
        pytest.raises(ValueError, match=r"\.lock, the lock of the workdir, is a named pipe"),
        locked(tmp_path),
    ):
        pass


def test_a_lock_is_lost_with_its_workdir(tmp_path):
    workdir = tmp_path / "run"
    with locked(workdir) as still_ours:
        assert still_ours()
        workdir.rename(tmp_path / "elsewhere")
        assert not still_ours()
    assert [p.name for p in tmp_path.iterdir()] == ["elsewhere"]
    with contextlib.ExitStack() as first:
        first_has_it = first.enter_context(locked(workdir))
        shutil.rmtree(workdir)
        with locked(workdir) as second_has_it:
            assert not first_has_it()
            first.close()  # removes nothing of the second's, which is still empty
            assert second_has_it()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE])
def test_an_error_without_a_path_gets_one(code):
    with pytest.raises(OSError, match="/somewhere/else"), naming("/somewhere/else"):
        raise OSError(code, os.strerror(code))
    with pytest.raises(OSError, match="'a'"), naming("/somewhere/else"):
        raise OSError(code, os.strerror(code), "a")
