"""A run from its first step to its results: resumed, interrupted, refused, damaged, continued."""

import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rope_jax.runs.run
import rope_jax.training.folder
from rope_jax import data
from rope_jax.analysis.runs import read_runs
from rope_jax.config import ConfigError
from rope_jax.evaluate import read_results
from rope_jax.system.files import SaveFailed
from rope_jax.training import checkpoint, loop, metrics
from rope_jax.training.checkpoint import Checkpoints, NonFinite
from rope_jax.training.metrics import read_events, read_metrics
from rope_jax.training.setup import (
    initial_state,
    prepare,
)
from rope_jax.training.signals import Interrupted
from rope_jax.training.step import make_step
from rope_jax.training.trees import not_finite, tree_hash
from tests.training.recipe import (
    accuracy,
    advance,
    assert_same_end,
    final_state,
    losses,
    run,
    run_in_parts,
    start,
    tiny,
)

AVERAGED = {"ema_decay": 0.9}
TOO_FAST = {"optim__learning_rate": 1e30, "optim__warmup_epochs": 0.0}
SKIPPING = TOO_FAST | AVERAGED | {"non_finite": "skip"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    run(workdir, **AVERAGED)
    return workdir


def select_events(workdir, kind):
    return [event for event in read_events(workdir / "metrics.jsonl") if event["event"] == kind]


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of a finished run."""
    return shutil.copytree(finished, tmp_path / "copy")


def test_runs_write_their_files(finished):
    files = {"config.json", "metrics.jsonl", "results.json", "checkpoints", "accuracy.png"}
    assert {p.name for p in finished.iterdir()} >= files
    steps, values = zip(*losses(finished), strict=True)
    assert steps == tuple(range(1, 25))
    assert values[-1] < values[0]
    results = read_results(finished)
    fields = {"dataset", "split", "resolution", "top1", "top5", "count", "protocol", "data"}
    assert (results["step"], *map(set, results["eval"])) == (24, fields, fields)
    assert [(row["resolution"], row["count"]) for row in results["eval"]] == [
        ([8, 8], 360),
        ([4, 6], 360),
    ]
    assert all(row["top1"] <= row["top5"] <= 1 for row in results["eval"])


@pytest.mark.slow
def test_tensorboard_has_results_and_pictures(copy):
    pytest.importorskip("tensorboardX", reason="TensorBoard files need the extra `log`")
    (copy / "results.json").unlink()
    run(copy, tensorboard=True, **AVERAGED)
    (path,) = (copy / "tensorboard").iterdir()
    board = path.read_bytes()  # protocol buffers store names, floats and bytes as they are
    for row in read_results(copy)["eval"]:
        assert f"top1_{'x'.join(map(str, row['resolution']))}/rope_mixed".encode() in board
        assert struct.pack("<f", row["top1"]) in board
    assert b"\x89PNG" in board


def test_the_loaded_model_has_the_scores_of_the_run(finished):
    model, config = rope_jax.load_checkpoint(str(finished))
    for row in read_results(finished)["eval"]:
        assert accuracy(model, config, row["resolution"]) == pytest.approx(row["top1"], abs=1e-9)


def test_averaged_and_last_weights_can_be_chosen(finished):
    leaf = lambda **options: np.asarray(
        rope_jax.load_checkpoint(str(finished), **options)[0].head.kernel[...]
    )
    assert np.array_equal(leaf(), leaf(ema=True))
    assert not np.array_equal(leaf(ema=True), leaf(ema=False))
    assert not np.array_equal(leaf(step=16), leaf(step=24))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 3; there are \[16, 24\]"):
        leaf(step=3)


def test_finished_runs_change_nothing(finished, capsys):
    before = {p: p.read_bytes() for p in finished.iterdir() if p.is_file() and p.suffix != ".png"}
    run(finished, **AVERAGED)
    assert "training is complete" in capsys.readouterr().out
    assert before == {p: p.read_bytes() for p in before}


def test_interrupted_runs_resume_bit_for_bit(tmp_path, finished, capsys):
    """Between two checkpoints, and at one; results of a moved run are not reused."""
    rows = [row | {"top1": 2.0} for row in read_results(finished)["eval"]]
    (tmp_path / "results.json").write_text(json.dumps({"step": 24, "eval": rows}))
    run_in_parts(tmp_path, 3, 16, **AVERAGED)
    assert_same_end(tmp_path, finished, **AVERAGED)
    stop, *_ = select_events(tmp_path, "stop")
    assert stop == {"step": 3, "event": "stop", "why": "stopped by SIGINT", "resumes_from": 3}
    out = capsys.readouterr().out
    assert "stopped at step 3 of 24; newest checkpoint: step 3" in out
    assert "saved step 8: 0.0 MB" in out


def test_non_finite_losses_stop_the_run_unsaved(tmp_path):
    with pytest.raises(
        NonFinite,
        match=r"step \d+: loss (nan|inf).*nothing was saved.*learning_rate, or look at its "
        r"examples: \d+, ",
    ):
        run(tmp_path, **TOO_FAST)
    assert not list((tmp_path / "checkpoints").iterdir())
    assert not (tmp_path / "results.json").exists()


def test_overflowing_parameters_are_not_saved(tmp_path, monkeypatch):
    # The loss of the last step before a checkpoint is finite, but the update is not.
    monkeypatch.setattr(
        optax, "apply_updates", lambda params, updates: jax.tree.map(lambda p: p * jnp.inf, params)
    )
    with pytest.raises(
        NonFinite,
        match=r"step 1 is not saved: .* not finite; nothing was saved\. .* its examples: \d+, ",
    ):
        run(tmp_path, checkpoint_every=1)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_other_configs_are_refused_on_resume(finished):
    with pytest.raises(
        ConfigError,
        match=r"another config \(model.position: 'rope_mixed' -> 'ape'; batch_size: 120 -> 60\)",
    ):
        run(finished, **AVERAGED, model__position="ape", batch_size=60)


def test_finished_runs_are_evaluated_at_other_resolutions(finished, copy):
    config = tiny(**AVERAGED, eval__resolutions=(6, (4, 6)), log_every=7)
    rope_jax.runs.run.train(config, copy, mode="evaluate")
    old, new = (read_results(workdir)["eval"] for workdir in (finished, copy))
    assert [row["resolution"] for row in new] == [[8, 8], [6, 6], [4, 6]]
    assert [new[0], new[2]] == old


def test_results_follow_the_settings(copy, capsys):
    """Results of overridden settings are set aside when the run's own return, and vice versa."""
    changed, options = {"data__mean": (0.9, 0.1, 0.9)}, {"resume_override": ["data.mean"]}
    first = read_results(copy)
    for changes, names in ((changed, options), ({}, {})):
        rope_jax.runs.run.train(tiny(**AVERAGED | changes), copy, mode="evaluate", **names)
        (result,) = read_runs(copy)
        assert result.config.data.mean == tiny(**changes).data.mean
        assert (read_results(copy) == first) == (not changes)
    assert "results.json was computed with other settings (data.mean: " in capsys.readouterr().err
    assert len(list(copy.glob("results.json.before*"))) == 2


def test_evaluation_needs_a_trained_run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no checkpoints yet"):
        rope_jax.load_checkpoint(str(tmp_path))
    with pytest.raises(ConfigError, match="does not exist: train first"):
        rope_jax.runs.run.train(tiny(), tmp_path / "nothing", mode="evaluate")


def test_bfloat16_keeps_float32_parameters():
    prepared, model = prepare(tiny(dtype="bfloat16"))
    batch = next(data.batches(prepared.images, batch_size=120, seed=0))
    after, _ = jax.eval_shape(make_step(prepared), initial_state(prepared, model), batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(after["params"])} == {jnp.dtype(jnp.float32)}
    assert jax.eval_shape(model, jnp.zeros((1, 8, 8, 3))).dtype == jnp.bfloat16


def write_images(path, seed, splits=("train", "test")):
    rng, arrays = np.random.default_rng(seed), {}
    for split in splits:
        arrays[f"{split}_images"] = rng.integers(0, 256, (240, 8, 8), dtype=np.uint8)
        arrays[f"{split}_labels"] = np.arange(240) % 10
    np.savez(path, **arrays)
    changes = {"data__source": "npz", "data__path": str(path), "epochs": 0.5}
    return changes | {"eval__resolutions": ()}


def test_fingerprints_of_arrays_ignore_their_place(tmp_path):
    """That a run with other images is not resumed is tested with files of images."""
    names = [("a.npz", 0), ("moved.npz", 0), ("b.npz", 1)]
    changes = [write_images(tmp_path / name, seed=seed) for name, seed in names]
    first, moved, other = (prepare(tiny(**each))[0].fingerprint for each in changes)
    assert first == moved
    assert not {*first.values()} & {*other.values()}


def test_missing_test_splits_are_reported_before_training(tmp_path):
    with pytest.raises(ConfigError, match=r"has no test images.*--config.data"):
        run(tmp_path / "run", **write_images(tmp_path / "a.npz", seed=0, splits=["train"]))
    assert os.listdir(tmp_path / "run") == [".lock"]


@pytest.mark.parametrize("during", ["evaluate_state", "start"])
def test_nothing_is_written_into_an_exchanged_workdir(tmp_path, copy, monkeypatch, during):
    """Neither during the evaluation of a run, nor between its lock and its first file."""
    (copy / "results.json").unlink()
    workdir = copy if during == "evaluate_state" else tmp_path / "new"
    work = getattr(rope_jax.runs.run, during)

    def exchange(*args, **kwargs):
        workdir.rename(tmp_path / "elsewhere")
        workdir.mkdir()
        return work(*args, **kwargs)

    monkeypatch.setattr(rope_jax.runs.run, during, exchange)
    with pytest.raises(SaveFailed, match=f"{workdir} was deleted or moved, or another run has"):
        run(workdir, **AVERAGED)
    assert not list(workdir.iterdir())


def stale(self, target, rename=pathlib.Path.replace):
    if target.name == "results.json":
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return rename(self, target)


@pytest.mark.parametrize(
    ("owner", "name", "replacement", "error", "message"),
    [
        (
            pathlib.Path,
            "replace",
            stale,
            SaveFailed,
            r"results\.json could not be written: Stale .*; step 24 is saved: run the same",
        ),
        (
            data,
            "evaluation_batches",
            lambda *_, **__: signal.raise_signal(signal.SIGTERM),
            Interrupted,
            "SIGTERM",
        ),
    ],
    ids=["failed", "interrupted"],
)
def test_missing_results_are_written_by_the_same_command(
    finished, copy, monkeypatch, owner, name, replacement, error, message
):
    (copy / "results.json").unlink()
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(error, match=message):
        run(copy, **AVERAGED)
    monkeypatch.undo()
    assert not (copy / "results.json").exists()
    run(copy, **AVERAGED)
    assert_same_end(copy, finished, **AVERAGED)


def test_checkpoints_of_other_schemas_are_not_resumed(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, {"step": jnp.zeros((), jnp.int32)}, about={"config": {"colour": 1}})
    with pytest.raises(ConfigError, match=f"^the checkpoint of {tmp_path} holds settings of anoth"):
        run(tmp_path)


def test_a_seed_gives_all_schemes_equal_other_weights():
    models = [
        rope_jax.create_model("vit_digits", position=position)
        for position in ("none", "ape", "rope_mixed+rpb")
    ]
    for part in (lambda model: model.head, lambda model: model.blocks[3].mlp.fc2):
        first, *others = [np.asarray(part(model).kernel[...]) for model in models]
        assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__num_classes": 5}, "digits has 10 classes"),
        (
            {"eval__resolutions": (7,)},
            r"7x7 is not divisible by the patch size 2.*eval.resolutions",
        ),
        ({"model__position": "axial_rope(k_rope=3)"}, r"k_rope=3.*\[--config.model"),
        ({"data__image_size": 9}, r"9x9 is not divisible by the patch size.*image_size"),
        ({"data__augment": "flap"}, "flap.*augment"),
        ({"data__augment": "crop(pad=8)"}, "pad.*augment"),
        ({"model__options": "depth=x"}, "depth must be a whole number of at least 1, not 'x'"),
        ({"model__options": "mlp_ratio=0"}, "mlp_ratio must be a number above 0, not 0"),
        ({"init_from": "/nowhere"}, "there is no such file.*init_from"),
    ],
)
def test_impossible_combinations_name_their_flag(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, **changes)
    assert not list(tmp_path.glob("*.json*"))


def test_events_record_starts_saves_and_stops(finished):
    events = read_events(finished / "metrics.jsonl")
    recorded = [(event["step"], event["event"]) for event in events]
    assert sorted(recorded) == [(0, "start"), *((n, "saved") for n in (8, 16, 24)), (24, "stop")]
    assert events[0]["resumes_from"] is None
    assert (events[-1]["why"], events[-1]["resumes_from"]) == ("complete", 24)
    assert all(event["bytes"] > 10_000 for event in events if event["event"] == "saved")


def test_damaged_checkpoints_cost_only_their_steps(finished, copy, capsys):
    (copy / "checkpoints" / "24" / "manifest.json").unlink()
    damaged = r"24( of .*)? is damaged: manifest.json is missing"
    with pytest.raises(ConfigError, match=f"{damaged}; without --strict_restore"):
        rope_jax.runs.run.train(tiny(**AVERAGED), copy, strict_restore=True)
    rope_jax.load_checkpoint(str(copy))  # reads 16, and renames nothing
    with pytest.raises(ValueError, match=damaged):
        rope_jax.load_checkpoint(str(copy), step=24)
    run(copy, **AVERAGED)
    assert "found step 16 of 24" in capsys.readouterr().out
    assert_same_end(copy, finished, **AVERAGED)
    assert sorted(os.listdir(copy / "checkpoints")) == ["16", "24", "24.corrupt"]


@pytest.mark.parametrize(
    "change", [{"model__options": "depth=1,width=32,heads=1"}, {"optim__name": "sgd"}]
)
def test_states_of_different_shapes_are_not_resumed(change, finished):
    name = next(iter(change)).replace("__", ".")
    with pytest.raises(ConfigError, match=r"arrays are not those of this run: .*\[--workdir\]"):
        rope_jax.runs.run.train(tiny(**AVERAGED | change), finished, resume_override=[name])


@pytest.mark.slow
def test_changed_configs_resume_if_named(tmp_path, capsys):
    run(tmp_path, epochs=0.2, eval__resolutions=())
    changed = tiny(epochs=0.4, seed=1, eval__resolutions=())
    resume = lambda *names: rope_jax.runs.run.train(changed, tmp_path, resume_override=names)
    for names, message in (
        ((), r"\(seed: 0 -> 1; epochs: 0.2 -> 0.4\).*--resume_override=seed,epochs resumes"),
        (["seed"], r"\(epochs: 0.2 -> 0.4\)"),
        (["sead"], "--resume_override=sead is not a setting; did you mean 'seed'"),
    ):
        with pytest.raises(ConfigError, match=message):
            resume(*names)
    resume("seed", "epochs")
    warning = "WARNING: resuming with other settings: seed: 0 -> 1; epochs: 0.2 -> 0.4"
    assert warning in capsys.readouterr().err
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("caf\udce9", "no checkpoint can be stored in "),
        ("back\\slash", "no checkpoint can be stored in "),
        ("file/run", "file/run"),
    ],
)
def test_impossible_workdirs_are_named_early(tmp_path, name, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"{message}.*\[--workdir\]"):
        run(tmp_path / name)
    assert os.listdir(tmp_path) == ["file"]


def test_non_finite_updates_are_skipped():
    setup, state, step = start(**SKIPPING)
    state["params"]["head"]["kernel"] = jnp.full_like(state["params"]["head"]["kernel"], 3e38)
    after, metrics = advance(setup, state, step, 0, 1)
    assert not np.isfinite(metrics["loss"])
    assert tree_hash(after) == tree_hash(state | {"step": np.int32(1)})


def test_skipping_ends_after_ten_in_a_row(tmp_path, capsys):
    with pytest.raises(
        NonFinite,
        match=r"step 1\d: loss .*, after 10 skipped steps in a row; the newest checkpoint is of "
        "step 8",
    ):
        run(tmp_path, **SKIPPING)
    assert len(select_events(tmp_path, "skipped")) == 10
    assert capsys.readouterr().err.count("its update is skipped") == 10
    assert not not_finite(final_state(tmp_path, **SKIPPING))


@pytest.mark.parametrize("failing", [16, 24])
def test_only_the_last_failed_checkpoint_ends_the_run(tmp_path, monkeypatch, capsys, failing):
    seal, folder = checkpoint.seal, tmp_path / "checkpoints"

    def full(path, step):
        if step == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        seal(path, step)

    message = f"step {failing} could not be saved in {folder}: .*No space left on device"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "seal", full)
        last = pytest.raises(SaveFailed, match=message)
        with last if failing == 24 else contextlib.nullcontext():
            run(tmp_path, **AVERAGED)
    assert re.search(f"WARNING: {message}", capsys.readouterr().err)
    (stop,) = select_events(tmp_path, "stop")
    assert stop["resumes_from"] == (24 if failing == 16 else 16)
    run(tmp_path, **AVERAGED)
    assert sorted(os.listdir(folder)) == (["24", "8"] if failing == 16 else ["16", "24"])


@pytest.mark.parametrize(
    ("owner", "name"), [(rope_jax.training.setup, "create"), (loop, "make_step")]
)
def test_signals_before_the_first_step_end_the_run(tmp_path, monkeypatch, owner, name):
    (tmp_path / "checkpoints" / "8.writing").mkdir(parents=True)  # half a checkpoint is none

    def stop(*_):
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the run continued")

    monkeypatch.setattr(owner, name, stop)
    with pytest.raises(Interrupted, match="SIGTERM") as caught:
        run(tmp_path)
    assert not caught.value.saved


@pytest.mark.parametrize("saved", [8, pytest.param(24, marks=pytest.mark.slow)])
def test_signals_wait_for_a_checkpoint_in_progress(tmp_path, monkeypatch, saved):
    write, begun = Checkpoints._write, threading.Event()

    def slow(self, step, *args):
        if step == saved:
            signal.raise_signal(signal.SIGUSR1)
            begun.wait(0.2)
        write(self, step, *args)

    monkeypatch.setattr(Checkpoints, "_write", slow)
    with pytest.raises(Interrupted, match="SIGUSR1") as caught:
        run(tmp_path, **AVERAGED)
    assert caught.value.saved
    newest = int(final_state(tmp_path, **AVERAGED)["step"])
    assert newest == read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] >= saved
    assert not (tmp_path / "results.json").exists()


def test_nothing_moves_to_the_device_between_steps(tmp_path, monkeypatch):
    """Transfers are allowed only while the first step compiles."""

    def make_careless(run):
        step, moved = make_step(run), lambda: jnp.square(np.ones(3))  # without being asked to
        return lambda state, batch: (moved(), step(state, batch))[1]

    monkeypatch.setattr(loop, "make_step", make_careless)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        run(tmp_path, **AVERAGED)


@pytest.mark.slow
def test_profiles_are_recorded_on_request(tmp_path):
    run(tmp_path, **AVERAGED, profile_at=3)
    (event,) = select_events(tmp_path, "profile")
    assert (event["step"], event["folder"]) == (7, str(tmp_path / "profile"))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_unreadable_files_are_reported_with_the_workdir(tmp_path, finished, monkeypatch):
    fail = mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied", "some/file"))
    for owner, name, workdir in (
        (metrics, "open_regular", tmp_path),
        (rope_jax.runs.run, "usable_results", finished),
        (rope_jax.training.folder, "read_json", finished),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(ConfigError, match=r"denied: 'some/file' \[--workdir\]"):
                run(workdir, **AVERAGED)
