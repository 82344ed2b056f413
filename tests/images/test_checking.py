import errno
import os
import threading

import pytest

from rope_jax.data import BadSet, batches, checking, evaluation_batches, load, open_source
from rope_jax.data.checking import FileCheck
from rope_jax.data.prepare import prepare
from rope_jax.files import has_sha256
from tests.images.test_streamed import write_folder


@pytest.fixture
def images(tmp_path):
    """A packed set of three shards."""
    write_folder(tmp_path / "set")
    source = open_source("folder", str(tmp_path / "set"), "train")
    prepare(source, tmp_path / "packed", shard_images=2, side=24)
    return load("packed", str(tmp_path / "packed"), "train", (8, 8))


@pytest.fixture
def read(monkeypatch):
    """The files that are compared, in order; `errors` are raised in turn before they are."""
    names = []

    def reading(path, sha256):
        names.append(path.name)
        if reading.errors:
            raise reading.errors.pop(0)
        return has_sha256(path, sha256)

    reading.errors, reading.names = [], names
    monkeypatch.setattr(checking, "has_sha256", reading)
    monkeypatch.setattr(checking, "RETRY_AFTER", (0.0, 0.0, 0.0))
    return reading


SHARDS = [f"images-0000{number}.bin" for number in range(3)]


def test_a_process_reads_each_file_once(images, read, tmp_path):
    """However many evaluations there are, and whatever opens the set."""
    again = load("packed", str(tmp_path / "packed"), "train", (6, 6))
    for one in (images, images, again):
        assert len(list(evaluation_batches(one, batch_size=4))) == 2
    with batches(again, batch_size=6, seed=0) as stream:
        next(stream)
    assert read.names == SHARDS


def test_a_check_that_was_ended_goes_on_where_it_was(images, read):
    check = FileCheck(images, lambda seconds: None)
    check.close()
    check(wait=True)
    assert read.names == []
    FileCheck(images, lambda seconds: None)(wait=True)
    assert read.names == SHARDS


def test_reads_that_fail_are_tried_again(images, read):
    read.errors[:] = [OSError(errno.EIO, os.strerror(errno.EIO), "shard")] * 3
    FileCheck(images, lambda seconds: None)(wait=True)
    assert read.names == [*[SHARDS[0]] * 3, *SHARDS]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EIO, os.strerror(errno.EIO), "shard"), "Input/output error: 'shard'"),
        (ValueError("shard is a device"), "ValueError: shard is a device"),
        (MemoryError("no memory"), "MemoryError: no memory"),
    ],
)
def test_a_check_that_cannot_be_made_does_not_pass(images, read, error, words):
    read.errors[:] = [error] * 4
    with pytest.raises(BadSet, match=f"the files of set cannot be checked: .*{words}"):
        FileCheck(images, lambda seconds: None)(wait=True)
    read.errors.clear()
    FileCheck(images, lambda seconds: None)(wait=True)  # the next one reads again


@pytest.fixture
def stalled(monkeypatch):
    """A file system that does not answer until the event is set."""
    answer = threading.Event()
    monkeypatch.setattr(checking, "has_sha256", lambda path, sha256: answer.wait(60))
    yield answer
    answer.set()


def test_waiting_is_told(images, stalled, monkeypatch, capsys):
    monkeypatch.setattr(checking, "_SAY_EVERY", 1)
    seconds = []

    def waiting(second):
        seconds.append(second)
        stalled.set()

    check = FileCheck(images, waiting)
    check(wait=False)
    assert seconds == []
    check(wait=True)
    assert seconds == [1]
    warning = "WARNING: 1 s without a batch: waiting for the checksums of set, train split"
    assert warning in capsys.readouterr().err


class Stop(BaseException):
    pass


def test_a_signal_ends_the_wait(images, stalled):
    """Neither at the end of the first epoch nor of an evaluation does it wait for the file."""

    def waiting(second):
        raise Stop

    for stream in (
        batches(images, batch_size=3, seed=0, waiting=waiting),
        evaluation_batches(images, batch_size=3, waiting=waiting),
    ):
        with stream:
            next(stream)
            with pytest.raises(Stop):
                next(stream)
