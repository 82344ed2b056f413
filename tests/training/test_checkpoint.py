import contextlib
import errno
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import time
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rope_jax.system.files import SaveFailed
from rope_jax.system.sharding import make_mesh, replicate, with_shardings
from rope_jax.training import checkpoint, integrity
from rope_jax.training.checkpoint import Checkpoints
from rope_jax.training.integrity import Damaged
from rope_jax.training.trees import tree_hash
from tests.faults.long import DAMAGES, damage
from tests.training.recipe import largest_file

ONES = np.ones((2, 3), np.float32)
BLOCKS = {0: {"kernel": ONES}, 1: {"kernel": ONES}}


def state(scale=1.0):
    params = {"blocks": BLOCKS | {0: {"kernel": scale * ONES}}}
    tree = {"count": np.int32(3), "params": params, "opt": optax.adamw(1e-3).init(params)}
    return jax.device_put(tree)


def shapes(tree):
    return with_shardings(tree, replicate(make_mesh()))


def load(checkpoints, step):
    return checkpoints.load(step, shapes(state()))


def save(checkpoints, step, tree):
    """Saves a state and waits until that has succeeded or failed."""
    checkpoints.save(step, tree, about={"seed": 1})
    checkpoints.wait()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder of two steps that verify: 1 of `state(1.0)`, 2 of `state(2.0)`."""
    folder = tmp_path_factory.mktemp("two")
    with Checkpoints(folder) as checkpoints:
        save(checkpoints, 1, state(1.0))
        save(checkpoints, 2, state(2.0))
    return folder


@pytest.fixture
def copied_steps(two_steps, tmp_path):
    """A copy of `two_steps`."""
    return shutil.copytree(two_steps, tmp_path / "run")


@pytest.mark.parametrize("name", ["plain", "lr[3e-3]", "a*b?", "link/..", "50%#é"])
def test_a_saved_state_is_restored_completely_or_in_part(tmp_path, name):
    """Orbax matches its files by patterns, and tensorstore resolves `..` in its own way."""
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    folder, reported = tmp_path / name / "checkpoints", []
    with Checkpoints(folder) as checkpoints:
        checkpoints.on_saved = lambda step, size, seconds: reported.append(
            (step, size, names(folder), checkpoints.problem(step))
        )
        checkpoints.save(3, state(2.5), about={"seed": 1})
    assert reported == [(3, sum(x.nbytes for x in jax.tree.leaves(state())), ["3"], None)]
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.newest_verified() == 3
        assert checkpoints.about(3) == {"seed": 1}
        assert tree_hash(load(checkpoints, 3)) == tree_hash(state(2.5))
        part = checkpoints.load(3, {"params": shapes(state())["params"]})
        assert tree_hash(part) == tree_hash({"params": state(2.5)["params"]})


def test_newest_steps_are_kept_and_none_is_overwritten(tmp_path, monkeypatch):
    (tmp_path / "0").touch()  # no checkpoint: neither counted nor removed
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3, 3):
            checkpoints.save(step, state(float(step)), about={})
        assert checkpoints.newest() == 3
        checkpoints.save(3, state(9.0), about={})
        checkpoints.wait()
        assert checkpoints.steps() == [0, 2, 3]
        assert tree_hash(load(checkpoints, 3)) == tree_hash(state(3.0))

        def refuse(path, ignore_errors=False):
            if not ignore_errors:
                raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(checkpoint.shutil, "rmtree", refuse)
        save(checkpoints, 4, state())  # an old one that cannot be removed is no failed save
        assert checkpoints.newest_verified() == 4


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"blocks": {0: {"kernel": ONES}}}, r"params.blocks.1.kernel is .*, not expected"),
        ({"blocks": BLOCKS, "extra": ONES}, "params.extra is missing"),
        ({"blocks": BLOCKS | {0: {"kernel": ONES.T}}}, r"float32\[2, 3\], not float32\[3, 2\]"),
        ({"blocks": BLOCKS | {0: {"kernel": ONES.astype(jnp.bfloat16)}}}, "not bfloat16"),
    ],
)
def test_other_trees_are_refused(two_steps, params, message):
    with Checkpoints(two_steps) as checkpoints, pytest.raises(ValueError, match=message):
        checkpoints.load(1, shapes(state() | {"params": params}))


def test_the_hash_depends_on_bits_names_and_dtypes():
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


def test_arrays_may_be_donated_during_a_save(tmp_path, monkeypatch):
    begin = threading.Event()
    write = checkpoint.ocp.save_checkpointables_async
    monkeypatch.setattr(
        checkpoint.ocp,
        "save_checkpointables_async",
        lambda *a, **k: begin.wait(30) and write(*a, **k),
    )
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 + 9, tree), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        first = jax.tree.map(jnp.copy, state(2.5))
        checkpoints.save(1, first, about={})
        assert jax.tree.all(jax.tree.map(lambda x: (x == 9).all(), update(first)))
        assert checkpoints.steps() == []  # training continued before anything was written
        begin.set()
        checkpoints.wait()
        assert tree_hash(load(checkpoints, 1)) == tree_hash(state(2.5))


def move_away(step):
    """Moves a step, or a part of it, to another folder."""
    return pathlib.Path(shutil.move(step, tempfile.mkdtemp()))


def edit_manifest(step, name, **facts):
    """Writes a consistent manifest with these facts about a file."""
    path = step / "manifest.json"
    files = json.loads(path.read_text())["files"] | {name: facts}
    path.write_text(integrity.manifest(2, files))


def make_pipe(path):
    """Makes a pipe, which waits for ever for a writer if it is opened."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def make_link(path):
    path.symlink_to(move_away(path))


def make_dangling_link(path):
    path.symlink_to("nowhere")


FOREIGN = {
    "a link to a file": lambda step: make_link(step / "_CHECKPOINT_METADATA"),
    "a link to a folder": lambda step: make_link(step / "params"),
    "a pipe": lambda step: make_pipe(step / "pipe"),
    "a pipe for a manifest": lambda step: make_pipe(step / "manifest.json"),
    "one file more": lambda step: (step / "sitecustomize.py").write_text("raise SystemExit"),
    "a name that leads out": lambda step: edit_manifest(step, "../1/manifest.json", bytes=1),
    "a manifest that is no JSON": lambda step: (step / "manifest.json").write_text("{"),
    "a link to the step": make_link,
    "a link to nothing": lambda step: (move_away(step), make_dangling_link(step)),
    "a file for a step": lambda step: (move_away(step), step.write_text("moved")),
    "another step": lambda step: (move_away(step), shutil.copytree(step.parent / "1", step)),
}


DAMAGED = {
    f"{kind} of {name}": lambda step, kind=kind, name=name: damage(
        step / name, kind, np.random.default_rng(0)
    )
    for kind in DAMAGES
    for name in ("manifest.json", "_CHECKPOINT_METADATA", "params/_METADATA", "opt/manifest.ocdbt")
}


@pytest.mark.parametrize("change", (FOREIGN | DAMAGED).values(), ids=FOREIGN | DAMAGED)
def test_damage_is_detected_and_an_older_step_used(copied_steps, change, capsys):
    change(copied_steps / "2")
    with Checkpoints(copied_steps) as checkpoints:
        assert checkpoints.newest_verified() == 1
        assert names(copied_steps) == ["1", "2"]
        with pytest.raises(Damaged, match=r"2 is damaged: .*; without --strict_restore"):
            checkpoints.newest_verified(strict=True, rename=True)
        assert checkpoints.newest_verified(rename=True) == 1
        assert names(copied_steps) == ["1", "2.corrupt"]
        assert tree_hash(load(checkpoints, 1)) == tree_hash(state(1.0))
    assert capsys.readouterr().err.endswith("It is kept as 2.corrupt\n")


def test_runs_do_not_restart_silently_if_nothing_verifies(copied_steps):
    for step in ("1", "2"):
        (copied_steps / step / "manifest.json").write_text("{}")
    with Checkpoints(copied_steps) as checkpoints:
        for rename, bad in ((False, "1, 2"), *2 * [(True, "1.corrupt, 2.corrupt")]):
            with pytest.raises(Damaged, match=rf"no checkpoint in .* verifies \({bad}\): repair"):
                checkpoints.newest_verified(rename=rename)


def test_handlers_named_in_checkpoints_are_not_imported(tmp_path, copied_steps, monkeypatch):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\n")
    path = copied_steps / "2" / "_CHECKPOINT_METADATA"
    metadata = json.loads(path.read_text())
    metadata["item_handlers"] = dict.fromkeys(metadata["item_handlers"], "evil.Handler")
    content = json.dumps(metadata).encode()
    path.write_bytes(content)
    edit_manifest(
        copied_steps / "2",
        path.name,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.syspath_prepend(tmp_path)
    with Checkpoints(copied_steps) as checkpoints:
        assert checkpoints.newest_verified() == 2
        with contextlib.suppress(OSError):
            assert tree_hash(load(checkpoints, 2)) == tree_hash(state(2.0))
    assert not (tmp_path / "marker").exists()
    assert "evil" not in sys.modules


MISSING = {
    "no arrays": "params/manifest.ocdbt",
    "no shapes": "params/_METADATA",
    "no config": "_CHECKPOINT_METADATA",
}


# After an error orbax leaves reads behind, which find their event loop closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", ["another bit", "another dtype", *MISSING])
def test_saves_that_read_back_differently_fail(tmp_path, monkeypatch, fault):
    """Older steps stay, even if only the newest is to be kept."""
    begin = checkpoint.ocp.save_checkpointables_async

    def begin_damaged_save(path, tree, **kwargs):
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
        save(checkpoints, 1, zeros)
        monkeypatch.setattr(checkpoint.ocp, "save_checkpointables_async", begin_damaged_save)
        message = ".*params.blocks.1.kernel " if "another" in fault else ""
        with pytest.raises(SaveFailed, match=f"step 2 could not be saved in .*: {message}"):
            save(checkpoints, 2, zeros)
        assert checkpoints.newest_verified(strict=True) == 1


def test_a_failed_save_hides_no_error(tmp_path, monkeypatch):
    fail = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(checkpoint.ocp, "save_checkpointables_async", fail)
    with contextlib.suppress(KeyError), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state(), about={})
        raise KeyError


def test_saves_survive_a_clock_that_jumps(tmp_path, monkeypatch):
    """Simulates a suspended laptop: four minutes pass between readings of the clock."""
    minutes = itertools.count(0, 4)
    monkeypatch.setattr(time, "time", lambda: 60.0 * next(minutes))
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 1, state())
    assert names(tmp_path) == ["1"]


def test_a_full_disk_keeps_older_steps(tmp_path, caplog):
    # A limit on the size of files simulates a full disk.
    large = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(300, 300)), jnp.float32)}
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 1, state())
        failed = pytest.raises(SaveFailed, match=r"step 2 could not be saved in .*too large")
        with failed, largest_file(100_000):
            save(checkpoints, 2, {"params": large})
        assert checkpoints.newest_verified(strict=True) == 1
        save(checkpoints, 3, {"params": large})
        assert names(tmp_path) == ["1", "3"]  # and nothing of the attempt
        assert "Traceback" not in caplog.text  # one message is enough
        assert checkpoints.newest_verified(strict=True) == 3


LEFT = ["9.writing", "9.writing.orbax-checkpoint-tmp-3", "8.deleting"]  # by a crash
OTHERS = ["x.writing", "9.writinge", "11.orbax-checkpoint-tmp-1", "7.corrupt", "notes", ".hidden"]
OTHERS += ["007", "-1", "1e3", "12 ", "\u0663"]  # a digit of another script


@pytest.mark.parametrize("make", [pathlib.Path.mkdir, pathlib.Path.touch, make_dangling_link])
def test_only_remains_of_a_crash_are_removed(copied_steps, make):
    for name in (*LEFT, *OTHERS):
        make(copied_steps / name)
    checkpoints = Checkpoints(copied_steps)
    checkpoints.clean()
    kept = OTHERS if make is pathlib.Path.mkdir else LEFT + OTHERS
    assert names(copied_steps) == sorted(["1", "2", *kept])
    assert checkpoints.newest_verified(strict=True) == 2


@pytest.mark.parametrize("name", ["load_checkpointables", "checkpointables_metadata"])
def test_unreadable_verified_files_are_not_damage(two_steps, monkeypatch, name):
    """Without file handles, orbax and tensorstore raise errors of any kind."""
    monkeypatch.setattr(
        checkpoint.ocp, name, mock.Mock(side_effect=TypeError("'NoneType' object is not"))
    )
    message = r"cannot be read \('NoneType'.*ulimit -n"
    with Checkpoints(two_steps) as checkpoints, pytest.raises(OSError, match=message):
        load(checkpoints, 2)
