import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import types

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rope_jax.files import SaveFailed, write_file
from rope_jax.sharding import make_mesh, replicated, with_shardings
from rope_jax.training.signals import Interrupted, stop_signals
from rope_jax.workdir import checkpoint, integrity
from rope_jax.workdir.checkpoint import Checkpoints, NonFinite
from rope_jax.workdir.integrity import Damaged
from rope_jax.workdir.trees import check_tree, tree_hash
from tests.faults.long import DAMAGES, damage


def state(scale=1.0):
    params = {"blocks": {0: {"kernel": jnp.full((2, 3), scale)}, 1: {"kernel": jnp.ones((2, 3))}}}
    return {
        "count": jnp.array(3, jnp.int32),
        "params": params,
        "opt": optax.adamw(1e-3).init(params),
    }


def shapes(tree):
    return with_shardings(tree, replicated(make_mesh()))


def test_what_is_saved_comes_back_whole_or_in_parts(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state(2.5), about={"seed": 1})
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [3]
        assert checkpoints.about(3) == {"seed": 1}
        assert tree_hash(checkpoints.load(3, shapes(state()))) == tree_hash(state(2.5))
        part = checkpoints.load(3, {"params": shapes(state())["params"]})
        assert set(part) == {"params"}
        assert list(part["params"]["blocks"]) == [0, 1]


def test_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(), about={})
        assert checkpoints.newest() == 3
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [2, 3]


def test_a_step_is_never_overwritten(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(1.0), about={})
        checkpoints.save(1, state(2.0), about={})
        checkpoints.wait()
        assert tree_hash(checkpoints.load(1, shapes(state()))) == tree_hash(state(1.0))


def test_numbers_that_are_not_finite_are_never_written(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(
            NonFinite, match=r"step 1 is not saved: params.blocks.0.kernel is not finite"
        ):
            checkpoints.save(1, state(np.nan), about={})
        assert checkpoints.steps() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["params"]["blocks"].pop(1), "params.blocks.1.kernel is not expected"),
        (lambda s: s["params"].update(extra=jnp.ones(1)), "params.extra is missing"),
        (
            lambda s: s["params"]["blocks"].update({0: {"kernel": jnp.ones((3, 2))}}),
            r"float32\[2, 3\], not float32\[3, 2\]",
        ),
        (
            lambda s: s["params"]["blocks"].update({0: {"kernel": jnp.ones((2, 3), jnp.bfloat16)}}),
            "not bfloat16",
        ),
    ],
)
def test_another_tree_is_refused(tmp_path, change, message):
    wanted = state()
    change(wanted)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(), about={})
        checkpoints.wait()
        with pytest.raises(ValueError, match=message):
            checkpoints.load(1, shapes(wanted))


def test_the_hash_tells_bits_names_and_dtypes_apart():
    a = np.array([1.0, 0.0], np.float32)
    trees = [
        {"a": a},
        {"b": a},
        {"a": a.astype(np.float64)},
        {"a": a[None]},
        {"a": np.array([1.0, -0.0], np.float32)},
    ]
    assert len({tree_hash(tree) for tree in trees}) == len(trees)
    assert tree_hash({"a": a}) == tree_hash({"a": jnp.asarray(a)})


def test_check_tree_names_the_first_problems():
    wanted = {str(n): jnp.ones(1) for n in range(9)}
    with pytest.raises(ValueError, match="and 4 more"):
        check_tree(wanted, {})


def test_missing_metadata_is_told(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(), about={})
        checkpoints.wait()
        with pytest.raises(ValueError, match="1 is damaged: its metadata is missing"):
            checkpoints.about(1)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder of two steps that verify: 1 of `state(1.0)`, 2 of `state(2.0)`."""
    folder = tmp_path_factory.mktemp("two")
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state(1.0), about={"seed": 1})
        checkpoints.save(2, state(2.0), about={"seed": 1})
    return folder


def files_of(step):
    """The files of a checkpoint by name, the largest first."""
    files = [path for path in step.rglob("*") if path.is_file()]
    return [
        str(path.relative_to(step))
        for path in sorted(files, key=lambda path: (-path.stat().st_size, path))
    ]


def copy_of(folder, target):
    shutil.copytree(folder, target, dirs_exist_ok=True)
    return target


def test_what_a_save_reports_is_there_and_verifies(tmp_path):
    reported = []
    with Checkpoints(tmp_path) as checkpoints:

        def on_saved(step, size, seconds):
            reported.append(
                (step, size, sorted(p.name for p in tmp_path.iterdir()), checkpoints.problem(step))
            )

        checkpoints.on_saved = on_saved
        checkpoints.save(7, state(), about={"seed": 1})
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state()))
    assert reported == [(7, size, ["7"], None)]


def test_the_arrays_may_be_donated_while_they_are_written(tmp_path, monkeypatch):
    begin = threading.Event()
    save = checkpoint.ocp.save_checkpointables_async
    monkeypatch.setattr(
        checkpoint.ocp,
        "save_checkpointables_async",
        lambda *a, **k: begin.wait(30) and save(*a, **k),
    )
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 + 9, tree), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        first = jax.tree.map(jnp.copy, state(2.5))
        checkpoints.save(1, first, about={})
        assert jax.tree.all(jax.tree.map(lambda x: (x == 9).all(), update(first)))
        assert checkpoints.steps() == []  # training has gone on before anything was written
        begin.set()
        checkpoints.wait()
        assert tree_hash(checkpoints.load(1, shapes(state()))) == tree_hash(state(2.5))


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_and_an_older_step_taken(tmp_path, two, kind, capsys):
    names = files_of(two / "2")
    assert {"manifest.json", "_CHECKPOINT_METADATA"} < set(names)
    for number, name in enumerate([*names[:3], "manifest.json", "_CHECKPOINT_METADATA"]):
        folder = copy_of(two, tmp_path / str(number))
        if not damage(folder / "2" / name, kind, np.random.default_rng(number)):
            continue  # an empty file has no bits to flip
        with Checkpoints(folder) as checkpoints:
            assert checkpoints.newest_verified(rename=True) == 1
            assert tree_hash(checkpoints.load(1, shapes(state()))) == tree_hash(state(1.0))
            assert sorted(p.name for p in folder.iterdir()) == ["1", "2.corrupt"]
        told = capsys.readouterr().err
        assert re.fullmatch(
            r"rope_jax: WARNING: checkpoint .*2 is damaged: .* It is kept as 2.corrupt\n", told
        )


def test_every_bit_of_the_manifest_counts(tmp_path, two):
    folder = copy_of(two, tmp_path)
    path = folder / "2" / "manifest.json"
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    with Checkpoints(folder) as checkpoints:
        for place in rng.choice(8 * len(good), 200, replace=False):
            bad = bytearray(good)
            bad[place // 8] ^= 1 << place % 8
            path.write_bytes(bad)
            assert checkpoints.problem(2) is not None, (place, bytes(bad))
        path.write_bytes(good)
        assert checkpoints.problem(2) is None


def test_strict_restore_stops_at_damage(tmp_path, two):
    folder = copy_of(two, tmp_path)
    (folder / "2" / "manifest.json").unlink()
    with (
        Checkpoints(folder) as checkpoints,
        pytest.raises(Damaged, match=r"2 is damaged: manifest.json is missing; without --strict"),
    ):
        checkpoints.newest_verified(strict=True, rename=True)
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2"]


def test_nothing_is_silently_begun_anew_when_nothing_verifies(tmp_path, two):
    folder = copy_of(two, tmp_path)
    for step in ("1", "2"):
        (folder / step / "manifest.json").write_text("{}")
    with Checkpoints(folder) as checkpoints:
        for _ in range(2):  # neither now nor at the next start
            with pytest.raises(
                Damaged,
                match=r"no checkpoint in .* verifies \(1.corrupt, 2.corrupt\): repair one, or move",
            ):
                checkpoints.newest_verified(rename=True)


@pytest.mark.parametrize(
    "kind",
    [
        "a link to a file",
        "a link to a folder",
        "a pipe",
        "a pipe for a manifest",
        "one file more",
        "a name that leads out",
    ],
)
def test_what_does_not_belong_into_a_checkpoint_is_refused(tmp_path, two, kind):
    folder = copy_of(two, tmp_path / "run")
    step, outside = folder / "2", tmp_path / "outside"
    outside.mkdir()
    if kind == "a link to a file":
        (step / "_CHECKPOINT_METADATA").rename(outside / "file")
        (step / "_CHECKPOINT_METADATA").symlink_to(outside / "file")
    elif kind == "a link to a folder":
        (step / "params").rename(outside / "params")
        (step / "params").symlink_to(outside / "params")
    elif kind == "a pipe":
        os.mkfifo(step / "pipe")
    elif kind == "a pipe for a manifest":
        (step / "manifest.json").unlink()
        os.mkfifo(step / "manifest.json")  # to open it would wait for ever
    elif kind == "one file more":
        (step / "sitecustomize.py").write_text("raise SystemExit")
    else:
        (outside / "secret").write_text("x")
        manifest = json.loads((step / "manifest.json").read_text())
        manifest["files"]["../../outside/secret"] = {
            "bytes": 1,
            "sha256": hashlib.sha256(b"x").hexdigest(),
        }
        (step / "manifest.json").write_text(integrity.manifest(2, manifest["files"]))
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.problem(2) is not None
        assert checkpoints.newest_verified() == 1


def test_a_handler_named_in_a_checkpoint_is_not_looked_up(tmp_path, two):
    folder = copy_of(two, tmp_path / "run")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\n")
    path = folder / "2" / "_CHECKPOINT_METADATA"
    about = json.loads(path.read_text())
    about["item_handlers"] = dict.fromkeys(about["item_handlers"], "evil.Handler")
    path.write_text(json.dumps(about))
    manifest = json.loads((folder / "2" / "manifest.json").read_text())["files"]
    manifest["_CHECKPOINT_METADATA"] = {
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    (folder / "2" / "manifest.json").write_text(integrity.manifest(2, manifest))
    sys.path.insert(0, str(tmp_path))
    try:
        with Checkpoints(folder) as checkpoints:
            assert checkpoints.newest_verified() == 2
            with contextlib.suppress(ValueError, KeyError):
                assert tree_hash(checkpoints.load(2, shapes(state()))) == tree_hash(state(2.0))
    finally:
        sys.path.remove(str(tmp_path))
    assert not (tmp_path / "marker").exists()
    assert "evil" not in sys.modules


@pytest.mark.parametrize("name", ["lr[3e-3]", "a*b?", "link/..", "50%#é"])
def test_every_folder_that_can_have_checkpoints_has_whole_ones(tmp_path, name):
    """Orbax looks for its own files by patterns, and tensorstore has its own idea of `..`."""
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    folder = tmp_path / name / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state(2.5), about={"seed": 1})
        checkpoints.wait()
        assert checkpoints.newest_verified() == 1
        assert checkpoints.about(1) == {"seed": 1}
        assert tree_hash(checkpoints.load(1, shapes(state()))) == tree_hash(state(2.5))
    assert sorted(p.name for p in folder.iterdir()) == ["1"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("caf\udce9", "is not UTF-8"), ("back\\slash", "a backslash for a")],
)
def test_a_folder_that_cannot_have_checkpoints_is_refused_before_it_is_made(
    tmp_path, name, problem
):
    with pytest.raises(ValueError, match=f"no checkpoint can be stored in .*: .*{problem}"):
        Checkpoints(tmp_path / name)
    assert not list(tmp_path.iterdir())


MISSING = {
    "no arrays": "params/manifest.ocdbt",
    "no shapes": "params/_METADATA",
    "no config": "_CHECKPOINT_METADATA",
}


@pytest.mark.parametrize("fault", ["another bit", "another dtype", *MISSING])
def test_what_is_not_read_back_as_it_was_written_is_no_checkpoint(tmp_path, monkeypatch, fault):
    """The older ones stay, also where only the newest is to be kept."""
    begin = checkpoint.ocp.save_checkpointables_async

    def damaged(path, tree, **kwargs):
        if fault.startswith("another"):  # 0.0 and -0.0 are equal, and have other bits
            kernel = tree["params"]["blocks"][1]["kernel"]
            other = np.copysign(kernel, -1) if fault == "another bit" else np.float16(kernel)
            blocks = {**tree["params"]["blocks"], 1: {"kernel": other}}
            return begin(path, {**tree, "params": {"blocks": blocks}}, **kwargs)
        response = begin(path, tree, **kwargs)

        def result():
            response.result()
            pathlib.Path(path, MISSING[fault]).unlink()

        return types.SimpleNamespace(result=result)

    zeros = state(0.0)
    zeros["params"]["blocks"][1]["kernel"] = jnp.zeros((2, 3))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, zeros, about={"seed": 1})
        checkpoints.wait()
        monkeypatch.setattr(checkpoint.ocp, "save_checkpointables_async", damaged)
        checkpoints.save(2, zeros, about={"seed": 1})
        named = ".*params.blocks.1.kernel " if "another" in fault else ""
        with pytest.raises(
            SaveFailed, match=f"step 2 could not .*: it cannot be read back: {named}"
        ):
            checkpoints.wait()
        assert checkpoints.steps() == [1]
        assert checkpoints.newest_verified() == 1


def test_an_old_step_that_cannot_be_removed_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    def refuse(self):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Checkpoints, "_prune", refuse)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, state(), about={})
    assert "step 1 is saved, but older checkpoints could not be removed" in capsys.readouterr().err


def test_a_failed_save_is_told_at_the_next_one_and_at_the_end(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.ocp, "save_checkpointables_async", fail)
    message = (
        r"step 1 could not be saved in .*No space left.*needs 152 bytes, .* are free; older "
        "checkpoints are untouched"
    )
    with Checkpoints(tmp_path / "a") as checkpoints:
        checkpoints.save(1, state(), about={})
        with pytest.raises(SaveFailed, match=message):
            checkpoints.save(2, state(), about={})
        assert checkpoints.steps() == []
    with pytest.raises(SaveFailed, match=message), Checkpoints(tmp_path / "b") as checkpoints:
        checkpoints.save(1, state(), about={})
    with contextlib.suppress(KeyError), Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(1, state(), about={})
        raise KeyError  # what ended the run first is not hidden by what its end finds


def test_a_passing_error_of_the_disk_is_tried_again(tmp_path, monkeypatch):
    save, failures = (
        checkpoint.ocp.save_checkpointables_async,
        iter([OSError(errno.EIO, "Input/output error"), ValueError("Stale file handle")]),
    )

    def sometimes(*args, **kwargs):
        if (error := next(failures, None)) is not None:
            raise error
        return save(*args, **kwargs)

    monkeypatch.setattr(checkpoint.ocp, "save_checkpointables_async", sometimes)
    monkeypatch.setattr(checkpoint, "RETRY_AFTER", (0.0, 0.0, 0.0))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(2.0), about={})
        checkpoints.wait()
        assert tree_hash(checkpoints.load(1, shapes(state()))) == tree_hash(state(2.0))
    failures = iter([OSError(errno.EIO, "Input/output error")] * 4)
    with (
        pytest.raises(SaveFailed, match="Input/output error"),
        Checkpoints(tmp_path) as checkpoints,
    ):
        checkpoints.save(2, state(), about={})


def test_a_file_that_may_not_grow_leaves_older_steps_alone(tmp_path, capfd):
    # A limit on the size of files stands in for a full disk.
    large = {
        "params": {"w": jnp.asarray(np.random.default_rng(0).normal(size=(300, 300)), jnp.float32)}
    }
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(), about={})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            checkpoints.save(2, large, about={})
            with pytest.raises(
                SaveFailed,
                match=r"step 2 could not be saved in .*It needs 360.0 kB \(360,000 bytes\), ",
            ):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert capfd.readouterr().err == ""  # no traces of what the exception tells
        assert checkpoints.newest_verified() == 1
        checkpoints.clean()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["1"]
        checkpoints.save(2, large, about={})
    assert Checkpoints(tmp_path).newest_verified() == 2


def test_a_file_that_does_not_fit_is_named_and_the_old_one_stays(tmp_path):
    write_file(tmp_path / "results.json", "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(
            SaveFailed, match=f"{tmp_path / 'results.json'} could not be written: File too large"
        ):
            write_file(tmp_path / "results.json", 2000 * "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "results.json").read_text() == "old"


def test_a_folder_that_has_vanished_is_named(tmp_path):
    with Checkpoints(tmp_path / "run") as checkpoints:
        (tmp_path / "run").rmdir()
        checkpoints.save(1, state(), about={})
        with pytest.raises(
            SaveFailed, match=f"could not be saved in {tmp_path / 'run'}: .*No such file"
        ):
            checkpoints.wait()


STEPS = ["5", "7", "007", "-1", "1e3", "12 ", "٣"]
UNFINISHED = [
    "9.writing",
    "9.writing.orbax-checkpoint-tmp-3",
    "8.deleting",
    "x.writing",
    "9.writinge",
    "11.orbax-checkpoint-tmp-1",
]
NAMES = st.sampled_from(
    [*STEPS, *UNFINISHED, "7.corrupt", "7.corrupt.2", "notes", "tmp", ".hidden"]
)
CONTENTS = st.sampled_from(
    [
        "empty",
        "file",
        "folder with a file",
        "half a checkpoint",
        "manifest that is no JSON",
        "link to a checkpoint",
    ]
)


@hypothesis.given(litter=st.dictionaries(NAMES, CONTENTS, max_size=8), good=st.booleans())
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
def test_any_litter_leaves_the_newest_step_that_verifies(two, litter, good):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if good:
            shutil.copytree(two / "2", folder / "2")
        for entry, content in litter.items():
            path = folder / entry
            if content == "file":
                path.write_text("x")
            elif content == "link to a checkpoint":
                path.symlink_to(two / "1")
            elif content == "half a checkpoint":
                shutil.copytree(two / "1", path)
                (path / "_CHECKPOINT_METADATA").unlink()
            else:
                path.mkdir()
                if content != "empty":
                    (
                        path / ("file" if content == "folder with a file" else "manifest.json")
                    ).write_text("{")
        before = sorted(p.name for p in folder.iterdir())
        checkpoints = Checkpoints(folder)
        checkpoints.clean()
        steps = [entry for entry in ("5", "7") if entry in litter]
        others = [entry for entry in steps if litter[entry] in ("file", "link to a checkpoint")]
        damaged = [] if others else steps  # otherwise refused before anything is looked at
        set_aside = [entry for entry in litter if ".corrupt" in entry]
        if others:
            with pytest.raises(Damaged, match="put the folder of that step in its place"):
                checkpoints.newest_verified(rename=True)
        elif good or not (damaged or set_aside):
            assert checkpoints.newest_verified(rename=True) == (2 if good else None)
        else:
            with pytest.raises(Damaged):
                checkpoints.newest_verified(rename=True)
        gone = {
            entry
            for entry in UNFINISHED[:3]
            if litter.get(entry, "file") not in ("file", "link to a checkpoint")
        }
        after = sorted(p.name for p in folder.iterdir())
        assert len(after) == len(before) - len(gone)
        assert set(before) - set(after) == gone | set(damaged)


def test_a_read_that_fails_condemns_no_checkpoint(tmp_path, two, monkeypatch):
    """A passing error is tried again; a lasting one stops the run, and nothing is renamed."""
    folder, read = copy_of(two, tmp_path), integrity.file_sha256
    monkeypatch.setattr(integrity, "RETRY_AFTER", (0.0, 0.0, 0.0))
    failures: list[OSError] = []

    def sometimes(path):
        if failures:
            raise failures.pop()
        return read(path)

    monkeypatch.setattr(integrity, "file_sha256", sometimes)
    with Checkpoints(folder) as checkpoints:
        for code in (errno.EIO, errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ESTALE):
            failures[:] = [OSError(code, os.strerror(code), "file")] * 3
            assert checkpoints.newest_verified(rename=True) == 2
            failures[:] = [OSError(code, os.strerror(code), "file")] * 4
            with pytest.raises(
                OSError, match=f"{os.strerror(code)}.*; it may be intact and was not"
            ):
                checkpoints.newest_verified(rename=True)
        assert sorted(p.name for p in folder.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("failing", ["load_checkpointables", "checkpointables_metadata"])
def test_files_that_verify_and_cannot_be_read_are_no_damage(two, monkeypatch, failing):
    """Without file handles, orbax and tensorstore raise errors of any kind."""

    def fail(*_):
        raise TypeError("'NoneType' object is not iterable")

    with Checkpoints(two) as checkpoints:
        monkeypatch.setattr(checkpoint.ocp, failing, fail)
        with pytest.raises(OSError, match=r"could not be read \('NoneType'.*ulimit -n"):
            checkpoints.load(2, shapes(state()))


def test_metadata_that_orbax_does_not_read_is_told(two, monkeypatch):
    original = checkpoint.ocp.checkpointables_metadata

    def without_trees(folder):
        found = original(folder)
        return types.SimpleNamespace(metadata=dict.fromkeys(found.metadata))

    with Checkpoints(two) as checkpoints:
        monkeypatch.setattr(checkpoint.ocp, "checkpointables_metadata", without_trees)
        with pytest.raises(OSError, match=r"could not be read: .*ulimit -n"):
            checkpoints.load(2, shapes(state()))


@pytest.mark.parametrize("kind", ["a link", "a link to nothing", "a file"])
def test_a_step_that_is_no_folder_of_its_own_is_refused(tmp_path, two, kind):
    folder = copy_of(two, tmp_path / "run")
    shutil.move(folder / "2", tmp_path / "elsewhere")
    if kind == "a file":
        (folder / "2").write_text("moved")
    else:
        (folder / "2").symlink_to(tmp_path / ("elsewhere" if kind == "a link" else "nowhere"))
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(Damaged, match=r"run/2 is .*: put the folder of that step in its place"):
            checkpoints.newest_verified(rename=True)
        assert checkpoints.newest() == 1  # a run that is under way goes on
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2"]


def test_a_state_of_another_step_is_refused(tmp_path, two):
    """As if a checkpoint were renamed, and its manifest written again."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(20, {"step": jnp.array(20)}, about={})
        checkpoints.wait()
        files = json.loads((tmp_path / "20" / "manifest.json").read_text())["files"]
        (tmp_path / "20").rename(tmp_path / "30")
        assert checkpoints.problem(30) == "manifest.json is not what was written"
        (tmp_path / "30" / "manifest.json").write_text(integrity.manifest(30, files))
        assert checkpoints.newest_verified() == 30
        with pytest.raises(Damaged, match="30 holds the state of step 20"):
            checkpoints.load(30, shapes({"step": jnp.array(0)}))


@pytest.mark.parametrize("lost", ["before", "while it is written"])
def test_nothing_is_written_to_a_workdir_that_is_no_longer_ours(tmp_path, monkeypatch, lost):
    begin, ours = checkpoint.ocp.save_checkpointables_async, [lost != "before"]

    def lose(path, *args, **kwargs):
        ours[:] = [False]
        return begin(path, *args, **kwargs)

    monkeypatch.setattr(checkpoint.ocp, "save_checkpointables_async", lose)

    def save(checkpoints):
        checkpoints.save(1, state(), about={})
        checkpoints.wait()

    message = f"^step 1 is not saved: {tmp_path} was deleted or moved, or another run has taken"
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, keep=2, still_ours=lambda: ours[0]) as checkpoints:
        with pytest.raises(SaveFailed, match=message):
            save(checkpoints)
        assert checkpoints.steps() == []
        assert lost != "before" or not list(folder.iterdir())


def test_a_lock_that_cannot_be_looked_up_is_not_lost(tmp_path):
    def stalled():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Checkpoints(tmp_path, still_ours=stalled) as checkpoints:
        checkpoints.save(1, state(), about={})
    assert checkpoints.steps() == [1]


def test_a_signal_while_a_checkpoint_is_read_is_no_error_of_reading(two, monkeypatch):
    def stopped(*args):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(checkpoint.ocp, "load_checkpointables", stopped)
    stopping = pytest.raises(Interrupted, match="SIGTERM")
    with Checkpoints(two) as checkpoints, stopping, stop_signals():
        checkpoints.load(2, shapes(state()))
