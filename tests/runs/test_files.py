"""Files of a workdir are complete or absent, and only one run writes them."""

import errno
import os
import shutil
from unittest import mock

import pytest

import rope_jax.runs.run
from rope_jax.config import ConfigError
from rope_jax.system import files
from rope_jax.system.files import SaveFailed, lock, read_json, read_regular, set_aside, write_file
from tests.training.recipe import largest_file, tiny


def test_a_failed_write_names_the_file_and_keeps_the_old_one(tmp_path):
    path = tmp_path / "results.json"
    write_file(path, "old")
    failed = pytest.raises(SaveFailed, match=f"{path} could not be written: File too large")
    with failed, largest_file(1000):
        write_file(path, 2000 * "x")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("results.json", "old")]


NO_FILES = {
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop of links": lambda path: path.symlink_to(path.name),
}

read_ten = lambda path: read_regular(path, at_most=10)


@pytest.mark.parametrize("kind", ["pipe", "device", "loop of links"])
def test_pipes_devices_and_links_are_replaced(tmp_path, kind):
    NO_FILES[kind](tmp_path / "accuracy.png")
    write_file(tmp_path / "accuracy.png", b"new")
    assert (tmp_path / "accuracy.png").read_bytes() == b"new"


def test_runs_are_not_evaluated_while_they_train(tmp_path):
    """Both would write its results."""
    (tmp_path / "checkpoints").mkdir()
    in_use = rf"is in use by process {os.getpid()} on .*: wait for it.*\[--workdir\]"
    with lock(tmp_path), pytest.raises(ConfigError, match=in_use):
        rope_jax.runs.run.train(tiny(), tmp_path, mode="evaluate")


def make_failing(code):
    """Makes a call that the system refuses."""
    return mock.Mock(side_effect=OSError(code, os.strerror(code)))


def test_file_systems_without_locks_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(files.fcntl, "flock", make_failing(errno.ENOLCK))
    message = rf"{tmp_path}/\.lock cannot be locked \(No locks.*: use a workdir on .*\[--workdir\]"
    with pytest.raises(ConfigError, match=message):
        rope_jax.runs.run.train(tiny(), tmp_path)


def make_hole(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte on no disk


DAMAGED = [b"", b"{", b"\xff", b"[" * 100_000, b'{"step": 1']


@pytest.mark.parametrize(
    ("make", "read", "message"),
    [
        *(  # a pipe would wait for its writer, and a device has no end
            (NO_FILES[kind], read, "is not a regular file")
            for kind in ("folder", "pipe", "device")
            for read in (read_ten, read_json)
        ),
        (make_hole, read_ten, "has 1,099,511,627,776 bytes; allowed are 10"),
        *((lambda path, x=x: path.write_bytes(x), read_json, "is not JSON") for x in DAMAGED),
    ],
)
def test_unusable_files_are_named(tmp_path, make, read, message):
    make(tmp_path / "file")
    with pytest.raises(ValueError, match=f"file {message}"):
        read(tmp_path / "file")


def test_files_set_aside_replace_nothing(tmp_path):
    for number in range(3):
        (tmp_path / "a").write_text(str(number))
        set_aside(tmp_path / "a", "it is damaged")
    kept = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert kept == {"a.damaged": "0", "a.damaged.2": "1", "a.damaged.3": "2"}


def test_locks_are_lost_with_their_workdir(tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    with lock(workdir) as first:
        with monkeypatch.context() as patch:
            patch.setattr(files.os.path, "samestat", make_failing(errno.EIO))
            assert first()  # it cannot be determined now
        workdir.rename(tmp_path / "elsewhere")
        assert not first()
        with lock(workdir) as second:
            assert (first(), second()) == (False, True)
            shutil.rmtree(workdir)
            assert not second()
