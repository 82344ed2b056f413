"""Files of a workdir are complete or absent, and only one run writes them."""

import errno
import os
import resource
import shutil

import pytest

import rope_jax.runs.run
from rope_jax.config import ConfigError
from rope_jax.system import files
from rope_jax.system.files import SaveFailed, locked, read_json, read_regular, set_aside, write_file
from tests.training.recipe import tiny


def test_a_file_that_does_not_fit_is_named_and_the_old_one_stays(tmp_path):
    path = tmp_path / "results.json"
    write_file(path, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(SaveFailed, match=f"{path} could not be written: File too large"):
            write_file(path, 2000 * "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("results.json", "old")]


@pytest.mark.parametrize("kind", ["pipe", "device", "loop of links"])
def test_what_is_in_the_way_of_a_file_is_replaced(tmp_path, kind):
    make(tmp_path / "accuracy.png", kind)
    write_file(tmp_path / "accuracy.png", b"new")
    assert (tmp_path / "accuracy.png").read_bytes() == b"new"


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
        rope_jax.runs.run.evaluate_newest(tiny(), tmp_path)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", none)
    message = rf"{tmp_path}/\.lock cannot be locked \(No locks.*: use a workdir on .*\[--workdir\]"
    with pytest.raises(ConfigError, match=message):
        rope_jax.runs.run.train(tiny(), tmp_path)


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


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_only_regular_files_are_read(tmp_path, kind):
    """A pipe would wait for its writer, and a device has no end."""
    make(tmp_path / "file", kind)
    for read in (lambda path: read_regular(path, at_most=10), read_json):
        with pytest.raises(ValueError, match="file is not a regular file"):
            read(tmp_path / "file")


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


def test_what_is_set_aside_replaces_nothing(tmp_path):
    for number in range(3):
        (tmp_path / "a").write_text(str(number))
        set_aside(tmp_path / "a", "it is damaged")
    kept = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert kept == {"a.damaged": "0", "a.damaged.2": "1", "a.damaged.3": "2"}


def test_a_lock_is_lost_with_its_workdir(tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    with locked(workdir) as first:
        assert first()
        with monkeypatch.context() as patch:
            patch.setattr(files.os.path, "samestat", unreachable)
            assert first()  # it cannot be told now
        workdir.rename(tmp_path / "elsewhere")
        assert not first()
        with locked(workdir) as second:
            assert second()
            assert not first()
            shutil.rmtree(workdir)
            assert not second()


def unreachable(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))
