import errno
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rope_jax
from rope_jax import checkpoint, data, train
from rope_jax.checkpoint import tree_hash
from rope_jax.config import ConfigError
from rope_jax.evaluate import normalise
from rope_jax.metrics import read_events, read_metrics
from rope_jax.sharding import put_batch
from rope_jax.workdir import SaveFailed, locked

from .recipe import final_state, replaced, run, tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    return workdir, run(workdir, ema_decay=0.9)


def interrupt_at(monkeypatch, step):
    """Sends SIGINT while the batch of this step is drawn."""
    original = data.batches

    def batches(*args, start_step=0, **kwargs):
        for number, batch in enumerate(original(*args, start_step=start_step, **kwargs), start_step + 1):
            if number == step:
                signal.raise_signal(signal.SIGINT)
            yield batch | {"bad": np.empty(0, np.int64)}

    monkeypatch.setattr(data, "batches", lambda *args, **kwargs: data.pipeline.Batches(batches(*args, **kwargs), 1))


def test_a_run_leaves_its_files(finished):
    workdir, _ = finished
    assert {p.name for p in workdir.iterdir()} >= {"config.json", "metrics.jsonl", "results.json", "checkpoints", "accuracy.png"}
    lines = read_metrics(workdir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    results = json.loads((workdir / "results.json").read_text())
    assert results["step"] == 24
    assert [row["resolution"] for row in results["eval"]] == [[8, 8], [4, 6]]
    for row in results["eval"]:
        assert set(row) == {"dataset", "split", "resolution", "top1", "top5", "count", "protocol"}
        assert row["count"] == 360
        assert 0 <= row["top1"] <= row["top5"] <= 1


def test_the_loaded_model_scores_what_the_run_reported(finished):
    workdir, _ = finished
    model, config = rope_jax.load_checkpoint(str(workdir))
    rows = json.loads((workdir / "results.json").read_text())["eval"]
    for row in rows:
        images = data.load("digits", None, "test", tuple(row["resolution"]))
        logits = model(normalise(jnp.asarray(images.images), config))
        assert (np.argmax(logits, -1) == images.labels).mean() == pytest.approx(row["top1"], abs=1e-9)


def test_averaged_and_last_weights_can_be_chosen(finished):
    workdir, _ = finished
    leaf = lambda **options: np.asarray(rope_jax.load_checkpoint(str(workdir), **options)[0].head.kernel[...])
    assert np.array_equal(leaf(), leaf(ema=True))
    assert not np.array_equal(leaf(ema=True), leaf(ema=False))
    assert not np.array_equal(leaf(step=16), leaf(step=24))
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 3; there are 16, 24"):
        leaf(step=3)


def test_a_workdir_that_has_saved_nothing_yet_is_told(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no checkpoints yet"):
        rope_jax.load_checkpoint(str(tmp_path))


def test_a_finished_run_says_so_and_changes_nothing(finished, capsys):
    workdir, _ = finished
    before = {p: p.read_bytes() for p in workdir.iterdir() if p.is_file() and p.suffix != ".png"}
    run(workdir, ema_decay=0.9)
    assert "training is complete" in capsys.readouterr().out
    assert before == {p: p.read_bytes() for p in before}


def test_interrupted_is_uninterrupted_bit_for_bit(tmp_path, finished, monkeypatch):
    for step in (3, 16):  # once between checkpoints, once at one
        with monkeypatch.context() as patch:
            interrupt_at(patch, step)
            with pytest.raises(train.Interrupted, match="SIGINT"):
                run(tmp_path, ema_decay=0.9)
        assert int(final_state(tmp_path, ema_decay=0.9)["step"]) == step
    run(tmp_path, ema_decay=0.9)
    workdir, _ = finished
    assert tree_hash(final_state(tmp_path, ema_decay=0.9)) == tree_hash(final_state(workdir, ema_decay=0.9))
    losses = [[(line["step"], line["loss"]) for line in read_metrics(w / "metrics.jsonl")] for w in (tmp_path, workdir)]
    assert losses[0] == losses[1]


def test_a_killed_run_repeats_the_steps_since_its_checkpoint(tmp_path, finished, monkeypatch):
    def kill(*args, **kwargs):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(train, "finish", kill)
        patch.setattr(
            train.Checkpoints,
            "save",
            lambda self, step, *a, save=train.Checkpoints.save, **k: save(self, step, *a, **k) if step < 20 else kill(),
        )
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path, ema_decay=0.9)
    run(tmp_path, ema_decay=0.9)
    assert tree_hash(final_state(tmp_path, ema_decay=0.9)) == tree_hash(final_state(finished[0], ema_decay=0.9))
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 25))


def test_a_non_finite_loss_stops_the_run_and_is_never_saved(tmp_path):
    with pytest.raises(
        train.NonFinite, match=r"step \d+: loss (nan|inf).*nothing was saved.*learning_rate, or look at its examples: \d+, "
    ):
        run(tmp_path, optim__learning_rate=1e30, optim__warmup_epochs=0.0)
    assert not list((tmp_path / "checkpoints").iterdir())
    assert not (tmp_path / "results.json").exists()


def test_parameters_that_overflow_are_not_saved_either(tmp_path, monkeypatch):
    # The loss of the last step before a checkpoint is finite, but the update is not.
    monkeypatch.setattr(optax, "apply_updates", lambda params, updates: jax.tree.map(lambda p: p * jnp.inf, params))
    with pytest.raises(train.NonFinite, match=r"step 1 is not saved: .* not finite; nothing was saved\. .* its examples: \d+, "):
        run(tmp_path, checkpoint_every=1)


def test_another_config_is_refused_on_resume(finished):
    workdir, _ = finished
    with pytest.raises(ConfigError, match=r"another config \(model.position: 'rope_mixed' -> 'ape'; batch_size: 120 -> 60\)"):
        run(workdir, ema_decay=0.9, model__position="ape", batch_size=60)


def test_cosmetic_changes_are_allowed_and_new_resolutions_are_evaluated(tmp_path):
    run(tmp_path, epochs=0.2)
    train.evaluate_newest(tiny(epochs=0.2, eval__resolutions=(6, (8, 4)), log_every=7), tmp_path)
    rows = json.loads((tmp_path / "results.json").read_text())["eval"]
    assert [row["resolution"] for row in rows] == [[8, 8], [6, 6], [8, 4]]


def test_evaluation_alone_needs_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="holds no checkpoints: train first"):
        train.evaluate_newest(tiny(), tmp_path / "nothing")


def test_the_step_is_adamw_on_the_smoothed_loss():
    config = tiny(label_smoothing=0.1, ema_decay=0.9)
    prepared, model = train.prepare(config)
    state = train.initial_state(prepared, model)
    batch = data.batches(prepared.images, batch_size=12, seed=0)
    batch = {name: jnp.asarray(value) for name, value in next(batch).items()}
    new, metrics = train.make_step(prepared)(jax.tree.map(jnp.copy, state), batch)

    def loss_of(params):
        logits, _ = prepared.apply(params, {}, normalise(batch["image"], config))
        targets = jax.nn.one_hot(batch["label"], 10) * 0.9 + 0.01
        return -(targets * jax.nn.log_softmax(logits)).sum(-1).mean()

    loss, grads = jax.jit(jax.value_and_grad(loss_of))(state["params"])
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    updates, _ = prepared.optimizer.update(grads, state["opt"], state["params"])
    expected = optax.apply_updates(state["params"], updates)
    for ours, theirs in zip(jax.tree.leaves(new["params"]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    for ours, average, last in zip(*(jax.tree.leaves(t) for t in (new["ema"], state["params"], new["params"])), strict=True):
        np.testing.assert_allclose(ours, 0.9 * average + 0.1 * last, atol=1e-6)


def test_bfloat16_keeps_float32_parameters(tmp_path):
    run(tmp_path, dtype="bfloat16", epochs=0.2)
    state = final_state(tmp_path, dtype="bfloat16", epochs=0.2)
    assert {leaf.dtype for leaf in jax.tree.leaves(state["params"])} == {jnp.dtype(jnp.float32)}


def write_images(path, seed, **arrays):
    rng = np.random.default_rng(seed)
    for split in ("train", "test"):
        arrays.setdefault(f"{split}_images", rng.integers(0, 256, (240, 8, 8), dtype=np.uint8))
        arrays.setdefault(f"{split}_labels", np.arange(240) % 10)
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return {"data__source": "npz", "data__path": str(path), "epochs": 0.5}


def test_other_images_are_refused_on_resume_and_moved_ones_are_not(tmp_path):
    run(tmp_path / "run", **write_images(tmp_path / "a.npz", seed=0))
    run(tmp_path / "run", **write_images(tmp_path / "moved.npz", seed=0))
    with pytest.raises(ConfigError, match="the images of the train split; the images of the test split"):
        run(tmp_path / "run", **write_images(tmp_path / "b.npz", seed=1))


def test_a_missing_test_split_is_told_before_training(tmp_path):
    with pytest.raises(ConfigError, match=r"has no test images.*--config.data"):
        run(tmp_path / "run", **write_images(tmp_path / "a.npz", seed=0, test_images=None, test_labels=None))
    assert not (tmp_path / "run").exists()


def test_results_of_a_run_that_was_moved_away_are_not_taken_for_ours(finished, tmp_path):
    old = json.loads((finished[0] / "results.json").read_text())
    rows = [row | {"top1": 2.0} for row in old["eval"]]
    (tmp_path / "results.json").write_text(json.dumps({"step": 1, "eval": rows}))
    run(tmp_path, ema_decay=0.9, epochs=0.1)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["step"] == 1
    assert all(row["top1"] <= 1 for row in results["eval"])


def test_an_interrupted_evaluation_is_done_by_the_next_start(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            data,
            "evaluation_batches",
            lambda *args, original=data.evaluation_batches, **kwargs: signal.raise_signal(signal.SIGTERM) or original(*args, **kwargs),
        )
        with pytest.raises(train.Interrupted, match="SIGTERM"):
            run(tmp_path, epochs=0.2)
    assert not (tmp_path / "results.json").exists()
    run(tmp_path, epochs=0.2)
    assert len(json.loads((tmp_path / "results.json").read_text())["eval"]) == 2


def test_the_same_seed_gives_every_scheme_the_same_other_weights():
    models = [rope_jax.create_model("vit_digits", position=position) for position in ("none", "ape", "rope_mixed+rpb")]
    for model in models[1:]:
        assert np.array_equal(model.head.kernel[...], models[0].head.kernel[...])
        assert np.array_equal(model.blocks[3].mlp.fc2.kernel[...], models[0].blocks[3].mlp.fc2.kernel[...])


def test_a_batch_that_the_devices_cannot_share_is_refused(monkeypatch):
    monkeypatch.setattr("rope_jax.run.make_mesh", lambda fsdp: jax.sharding.AbstractMesh((8,), ("data",)))
    with pytest.raises(ConfigError, match=r"--config.batch_size=100 cannot be divided over 8 devices; use 96 or 104"):
        train.prepare(tiny(batch_size=100))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__num_classes": 5}, "digits has 10 classes"),
        ({"eval__resolutions": (7,)}, r"7x7 is not divisible by the patch size 2.*eval.resolutions"),
        ({"model__position": "axial_rope(k_rope=3)"}, r"k_rope=3.*\[--config.model"),
        ({"data__image_size": 9}, r"9x9 is not divisible by the patch size.*image_size"),
        ({"data__augment": "flap"}, "flap.*augment"),
        ({"data__augment": "crop(pad=8)"}, "pad.*augment"),
        ({"model__options": "depth=x"}, "depth='x' must be of type int"),
        ({"model__options": "mlp_ratio=0"}, "mlp_ratio=0.0 is not allowed"),
        ({"init_from": "/nowhere"}, "holds no checkpoints.*init_from"),
    ],
)
def test_impossible_combinations_name_the_flag(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, **changes)
    assert not list(tmp_path.glob("*.json*"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained")
    run(workdir, epochs=0.5, model__position="ape")
    return workdir


def started(config):
    model = rope_jax.restore.create(config)
    rope_jax.restore.start_from(model, config)
    return model


def test_init_from_a_workdir_at_the_same_resolution(trained):
    config = replaced(tiny(init_from=str(trained), model__position="ape"), "data", image_size=(8, 8))
    config = replaced(config, "model", num_classes=10)
    images = jnp.ones((1, 8, 8, 3)) * jnp.linspace(0, 1, 8)[:, None]
    assert np.array_equal(started(config)(images), rope_jax.load_checkpoint(str(trained))[0](images))


def test_init_from_position_tables_follow_to_another_resolution(trained):
    config = replaced(tiny(init_from=str(trained), model__position="ape"), "data", image_size=(12, 16))
    config = replaced(config, "model", num_classes=10)
    images = jax.random.normal(jax.random.key(0), (2, 12, 16, 3))
    model = started(config)
    assert model.position.embedding.shape == (6 * 8, 16)
    np.testing.assert_allclose(model(images), rope_jax.load_checkpoint(str(trained))[0](images), atol=1e-5)


def test_init_from_a_head_for_other_classes_stays_fresh(trained, capsys):
    config = replaced(tiny(init_from=str(trained), model__position="ape"), "data", image_size=(8, 8))
    model = started(replaced(config, "model", num_classes=20))
    assert model.head.kernel.shape == (16, 20)
    assert "fresh head" in capsys.readouterr().out
    loaded = rope_jax.load_checkpoint(str(trained))[0]
    assert np.array_equal(model.norm.scale[...], loaded.norm.scale[...])


def test_init_from_a_weights_file(trained, tmp_path):
    rope_jax.restore.save_weights(rope_jax.load_checkpoint(str(trained))[0], str(tmp_path / "weights.npz"))
    run(tmp_path / "run", epochs=0.1, model__position="ape", init_from=str(tmp_path / "weights.npz"))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array(["a", "b"]), r"norm.scale holds <U1, not numbers"),
        (np.ones(3, np.float32), r"norm.scale has shape \[3\], not \[16\]"),
    ],
)
def test_init_from_weights_that_are_none_are_refused(trained, tmp_path, array, message):
    weights = {"norm.scale": np.resize(array, 16) if array.dtype.kind == "U" else array}
    np.savez(tmp_path / "weights.npz", **weights)
    config = replaced(tiny(init_from=str(tmp_path / "weights.npz"), model__position="ape"), "data", image_size=(8, 8))
    with pytest.raises(ConfigError, match=message):
        started(replaced(config, "model", num_classes=10))


def test_init_from_looks_at_shapes_before_it_reads(trained, tmp_path):
    # 4 TB by its header, which no machine could hold.
    with zipfile.ZipFile(tmp_path / "weights.npz", "w") as archive, archive.open("norm.scale.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (10**12,)})
    config = replaced(tiny(init_from=str(tmp_path / "weights.npz"), model__position="ape"), "data", image_size=(8, 8))
    with pytest.raises(ConfigError, match=r"norm.scale has shape \[1000000000000\], not \[16\]"):
        started(replaced(config, "model", num_classes=10))


def test_init_from_weights_of_another_model_are_refused_with_all_names(trained):
    config = replaced(tiny(init_from=str(trained)), "data", image_size=(8, 8))
    with pytest.raises(ConfigError, match=r"position.mixed is missing; position.embedding is not expected"):
        started(replaced(config, "model", num_classes=10))


def test_a_run_says_when_it_started_saved_and_stopped_and_why(tmp_path, finished, monkeypatch, capsys):
    events = read_events(finished[0] / "metrics.jsonl")
    assert [(e["event"], e["step"]) for e in events if e["event"] != "saved"] == [("start", 0), ("stop", 24)]
    assert [e["step"] for e in events if e["event"] == "saved"] == [8, 16, 24]
    assert (events[0]["resumes_from"], events[-1]["why"], events[-1]["resumes_from"]) == (None, "complete", 24)
    assert all(e["bytes"] > 10_000 for e in events if e["event"] == "saved")
    interrupt_at(monkeypatch, 11)
    with pytest.raises(train.Interrupted):
        run(tmp_path, ema_decay=0.9)
    stop = read_events(tmp_path / "metrics.jsonl")[-1]
    assert stop == {"step": 11, "event": "stop", "why": "stopped by SIGINT", "resumes_from": 11}
    out = capsys.readouterr().out
    assert "stopped at step 11 of 24; the newest checkpoint is of step 11" in out
    assert "saved step 8: 0.0 MB" in out


def test_a_damaged_checkpoint_costs_its_steps_and_nothing_else(tmp_path, finished, capsys):
    workdir = tmp_path / "run"
    shutil.copytree(finished[0], workdir)
    (workdir / "checkpoints" / "24" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"checkpoints/24 is damaged: manifest.json is missing; without --strict_restore"):
        train.train(tiny(ema_decay=0.9), workdir, strict_restore=True)
    assert rope_jax.load_checkpoint(str(workdir))[1] == rope_jax.load_checkpoint(str(finished[0]))[1]  # reads 16, and renames nothing
    with pytest.raises(ValueError, match=r"24 is damaged: manifest.json is missing; others are 16, 24"):
        rope_jax.load_checkpoint(str(workdir), step=24)
    run(workdir, ema_decay=0.9)
    captured = capsys.readouterr()
    assert "24 is damaged" in captured.err
    assert "found step 16 of 24" in captured.out
    assert tree_hash(final_state(workdir, ema_decay=0.9)) == tree_hash(final_state(finished[0], ema_decay=0.9))
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["16", "24", "24.corrupt"]
    lines = [[(line["step"], line["loss"]) for line in read_metrics(w / "metrics.jsonl")] for w in (workdir, finished[0])]
    assert lines[0] == lines[1]


def test_a_changed_config_goes_on_where_it_is_named(tmp_path, capsys):
    interrupted = tiny(epochs=0.2)
    train.train(interrupted, tmp_path)
    changed = tiny(epochs=0.4, seed=1)
    with pytest.raises(ConfigError, match=r"\(seed: 0 -> 1; epochs: 0.2 -> 0.4\).*--resume_override=seed,epochs goes on"):
        train.train(changed, tmp_path)
    with pytest.raises(ConfigError, match=r"\(epochs: 0.2 -> 0.4\)"):
        train.train(changed, tmp_path, resume_override=["seed"])
    with pytest.raises(ConfigError, match=r"--resume_override=sead is not a setting; did you mean 'seed'"):
        train.train(changed, tmp_path, resume_override=["sead"])
    train.train(changed, tmp_path, resume_override=["seed", "epochs"])
    assert "WARNING: going on with other settings: seed: 0 -> 1; epochs: 0.2 -> 0.4" in capsys.readouterr().err
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_a_workdir_in_use_is_refused_at_once(tmp_path):
    with locked(tmp_path):
        begun = time.monotonic()
        with pytest.raises(ConfigError, match=f"{tmp_path} is in use by process {os.getpid()} on .*: wait for it, or use another"):
            run(tmp_path)
        assert time.monotonic() - begun < 1
    with locked(tmp_path):
        pass


def test_a_lock_ends_with_its_process(tmp_path):
    source = importlib.util.find_spec("rope_jax.workdir").origin
    code = f"""
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("workdir", {source!r})
workdir = importlib.util.module_from_spec(spec)
spec.loader.exec_module(workdir)
with workdir.locked(pathlib.Path({str(tmp_path)!r})):
    print("locked", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match=f"in use by process {process.pid} on"), locked(tmp_path):
            pass
        process.kill()
        process.wait()
    with locked(tmp_path):
        pass


def test_a_workdir_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/run.*\[--workdir\]"):
        run(tmp_path / "file" / "run")


TOO_FAST = {"optim__learning_rate": 1e30, "optim__warmup_epochs": 0.0, "non_finite": "skip"}


def test_an_update_that_is_not_finite_is_skipped(tmp_path):
    prepared, model = train.prepare(tiny(**TOO_FAST))
    state = train.initial_state(prepared, model)
    batch = next(data.batches(prepared.images, batch_size=120, seed=0))
    step = train.make_step(prepared)
    broken = jax.tree.map(jnp.copy, state)
    broken["params"]["head"]["kernel"] = jnp.full_like(broken["params"]["head"]["kernel"], 3e38)
    before = tree_hash(broken | {"step": 1})
    after, metrics = step(broken, put_batch(batch, prepared.mesh))
    assert not np.isfinite(metrics["loss"])
    assert int(after["step"]) == 1
    assert tree_hash(after | {"step": 1}) == before
    better, metrics = step(jax.tree.map(jnp.copy, state), put_batch(batch, prepared.mesh))
    assert np.isfinite(metrics["loss"])
    assert tree_hash(better["params"]) != tree_hash(state["params"])


def test_skipping_ends_after_ten_in_a_row(tmp_path, capsys):
    with pytest.raises(train.NonFinite, match=r"step 1\d: loss .*, after 10 skipped steps in a row; the newest checkpoint is of step 8"):
        run(tmp_path, **TOO_FAST)
    events = [event for event in read_events(tmp_path / "metrics.jsonl") if event["event"] == "skipped"]
    assert len(events) == 10
    assert capsys.readouterr().err.count("its update is skipped") == 10
    assert not checkpoint.not_finite(final_state(tmp_path, **TOO_FAST))


def test_a_checkpoint_that_cannot_be_written_ends_the_run_at_the_next_one(tmp_path, monkeypatch):
    seal = train.Checkpoints._seal

    def full(self, step):
        if step == 16:
            raise OSError(errno.ENOSPC, "No space left on device")
        seal(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(train.Checkpoints, "_seal", full)
        with pytest.raises(SaveFailed, match=r"step 16 could not be saved in .*No space left on device"):
            run(tmp_path, ema_decay=0.9)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["16.writing", "8"]
    assert read_events(tmp_path / "metrics.jsonl")[-1]["resumes_from"] == 8
    run(tmp_path, ema_decay=0.9)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["16", "24"]


def test_training_goes_on_beside_a_save_but_not_past_the_next_one(tmp_path, monkeypatch):
    """So a kill costs at most an interval and what was computed while its checkpoint was written, which is no more than another one."""
    write, reached = train.Checkpoints._write, {}
    logged = lambda: read_metrics(tmp_path / "metrics.jsonl")[-1]["step"]

    def slow(self, step, *args):
        deadline = time.monotonic() + 30
        while logged() < step + 8 and step < 24 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)  # enough for many more steps
        reached[step] = logged()
        write(self, step, *args)

    monkeypatch.setattr(train.Checkpoints, "_write", slow)
    run(tmp_path, ema_decay=0.9)
    assert reached == {8: 16, 16: 24, 24: 24}


@pytest.mark.parametrize("phase", ["preparation", "compilation"])
def test_before_the_first_step_a_signal_ends_the_run_at_once(tmp_path, monkeypatch, phase):
    owner, name = {"preparation": (rope_jax.restore, "create"), "compilation": (train, "make_step")}[phase]
    original, went_on = getattr(owner, name), []
    if phase == "compilation":
        (tmp_path / "run" / "checkpoints" / "8.writing").mkdir(parents=True)  # half a checkpoint is none

    def stop(*args):
        signal.raise_signal(signal.SIGTERM)
        went_on.append(original(*args))

    monkeypatch.setattr(owner, name, stop)
    with pytest.raises(train.Interrupted, match="SIGTERM") as caught:
        run(tmp_path / "run")
    assert not went_on
    assert not caught.value.saved
    assert (tmp_path / "run").exists() == (phase == "compilation")  # nothing is left where nothing had begun


@pytest.mark.parametrize("saved", [8, 24])
def test_a_signal_while_a_checkpoint_is_written_waits_for_it(tmp_path, monkeypatch, saved):
    write, begun = train.Checkpoints._write, threading.Event()

    def slow(self, step, *args):
        if step == saved:
            signal.raise_signal(signal.SIGUSR1)
            begun.wait(0.2)
        write(self, step, *args)

    monkeypatch.setattr(train.Checkpoints, "_write", slow)
    with pytest.raises(train.Interrupted, match="SIGUSR1") as caught:
        run(tmp_path, ema_decay=0.9)
    assert caught.value.saved
    newest = int(final_state(tmp_path, ema_decay=0.9)["step"])
    assert newest == read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] >= saved
    assert not (tmp_path / "results.json").exists()


def test_nothing_moves_to_the_device_between_steps(tmp_path, monkeypatch):
    make_step, calls = train.make_step, itertools.count(1)

    def make_careless(run):
        step = make_step(run)

        def careless(state, batch):
            if next(calls) in (1, 3):
                jnp.square(np.ones(3))  # moves there without being asked to: allowed while the first step compiles
            return step(state, batch)

        return careless

    monkeypatch.setattr(train, "make_step", make_careless)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        run(tmp_path, ema_decay=0.9)
    assert next(calls) == 4


def test_a_profile_is_recorded_when_it_is_asked_for(tmp_path):
    run(tmp_path, ema_decay=0.9, profile_at=3)
    (event,) = (event for event in read_events(tmp_path / "metrics.jsonl") if event["event"] == "profile")
    assert (event["step"], event["folder"]) == (7, str(tmp_path / "profile"))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
