"""One run on many devices and processes gives the numbers of one, whatever stops or dies."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from rope_jax.evaluate import read_results
from rope_jax.system import sharding
from rope_jax.training.metrics import read_events, read_metrics
from tests.devices import environment, run_on_devices
from tests.faults.attacks import expect_end, outputs, wait_for_exit
from tests.faults.attacks.several import start
from tests.faults.processes import ROOT, Run
from tests.training.recipe import interrupt_at, losses


def abstract_mesh(data, fsdp):
    return jax.sharding.AbstractMesh((data, fsdp), ("data", "fsdp"))


@pytest.mark.parametrize(
    ("shape", "fsdp", "spec"),
    [
        ((384, 1152), 8, P(None, "fsdp")),
        ((1536, 384), 8, P("fsdp", None)),
        ((256, 256), 8, P(None, "fsdp")),  # the last of equals
        ((384, 1001), 8, P("fsdp", None)),  # 1001 classes cannot be divided
        ((12, 384, 1152), 8, P(None, None, "fsdp")),  # stacked layers
        ((384, 1152), 1, P()),
        ((129, 127), 8, P()),  # neither axis can
        ((8, 2047), 8, P()),  # too small to be worth it
        ((), 8, P()),
    ],
)
def test_parameters_are_split_along_their_longest_axis(shape, fsdp, spec):
    assert sharding.split_parameter(shape, abstract_mesh(2, fsdp)).spec == spec


def test_a_mesh_must_use_all_devices():
    with pytest.raises(ValueError, match="over 3 of 1 devices; use one of 1"):
        sharding.make_mesh(3)


_MODELS = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import rope_jax
from rope_jax.training.trees import named_leaves
from rope_jax.system.sharding import use_mesh, make_mesh, put_batch, split_parameter
import rope_jax.system.sharding as sharding

sharding.SMALLEST = 64
jax.config.update("jax_disable_most_optimizations", True)
SMALL = {"num_classes": 8, "image_size": 24, "drop_path": 0.3, "width": 16, "heads": (2,)}
SMALL["depths"] = (2,)
VIT = {"width": 32, "heads": 2}
SCANNED = {"depth": 2, "scan_layers": True, "drop_path": 0.3}
MODELS = {
    "vit_digits": {"position": "rope_mixed+rpb"} | VIT | SCANNED,
    "swin_t": {"position": "rpb+rope_mixed", "window_size": 3} | SMALL,
    "nat_mini": {"position": "rope_mixed+rpb", "kernel_size": 3} | SMALL,
    "vit_s16": {"position": "irpe", "depth": 1, "image_size": 32, "num_classes": 8} | VIT,
}
results = {}
rng = np.random.default_rng(0)
for name in sys.argv[2:]:
    options = MODELS[name]
    model = rope_jax.create_model(name, **options)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    # Tables and frequencies away from zero, so that their gradients count.
    moved = lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32)
    params = jax.tree.map(moved, nnx.to_pure_dict(params))
    size = options.get("image_size", 8)
    images = rng.normal(size=(16, size, size, 3)).astype(np.float32)
    batch = {"x": images, "y": np.arange(16, dtype=np.int32) % 8}
    for data, fsdp in ((1, 1), (2, 4)):
        mesh = make_mesh(fsdp, devices=jax.devices()[: data * fsdp])

        @jax.checkpoint
        def loss(params, batch):
            with use_mesh(mesh):
                model = nnx.merge(graph, params, rest)
                logits = model(batch["x"], train=True, key=jax.random.key(1))
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        laid = jax.tree.map(lambda x: jax.device_put(x, split_parameter(x.shape, mesh)), params)
        assert fsdp == 1 or any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(laid))
        step = jax.jit(jax.value_and_grad(loss)).lower(laid, put_batch(batch, mesh))
        # shard_map around attention
        assert ("manual_computation" in step.as_text()) == (mesh.size > 1)
        value, gradients = step.compile()(laid, put_batch(batch, mesh))
        key = f"{name}/{data}x{fsdp}/"
        results[key + "loss"] = value
        results |= {key + path: leaf for path, leaf in named_leaves(gradients)}
np.savez(sys.argv[1], **results)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "models",
    [("vit_digits", "swin_t"), pytest.param(("nat_mini", "vit_s16"), marks=pytest.mark.slow)],
    ids=" and ".join,
)
def test_losses_and_gradients_on_eight_devices_match_one(models, tmp_path):
    """Learned tables, scanned layers, drop path, rematerialisation; two copies of parameters."""
    run_on_devices(8, _MODELS, tmp_path / "results.npz", *models)
    assert_same_results(np.load(tmp_path / "results.npz"), "/1x1/", "/2x4/")


def assert_same_results(results, single, several, atol=0.0):
    """Compares results of several devices with those of one, by name, up to the order of sums.

    A gradient added twice would be off by a factor of 2 to 8.
    """
    names = [name for name in results.files if single in name]
    assert len(names) > 40
    for name in names:
        result, expected = results[name.replace(single, several)], results[name]
        allowed = {"rtol": 1e-4, "atol": atol + 1e-5 * np.abs(expected).max()}
        np.testing.assert_allclose(result, expected, **allowed, err_msg=name)


_DETECTOR = """
import sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import rope_jax
from rope_jax.config import resolve
from rope_jax.system.sharding import make_mesh, put_batch, use_mesh
from rope_jax.tasks import TASKS
from rope_jax.training.trees import named_leaves
from tests.models.heads.test_dino import CLASSES, HEAD, VIT
from tests.models.small import fill

jax.config.update("jax_disable_most_optimizations", True)
make = lambda: rope_jax.create_model("deit_ti16", head=HEAD, num_classes=CLASSES, **VIT)
graph, params, rest = nnx.split(fill(nnx.eval_shape(make)), nnx.Param, ...)
rng, counts, config = np.random.default_rng(0), (4, 2, 1, 0), resolve({})
corners = rng.uniform((0, 0, 20, 16), (20, 16, 40, 28), (4, 4, 4)).astype(np.float32)
label = rng.integers(0, CLASSES, (4, 4)).astype(np.int32)
label[np.arange(4) >= np.array(counts)[:, None]] = -1
batch = {
    "image": rng.integers(0, 256, (4, 32, 48, 3), np.uint8),
    "extent": np.array([[32, 48], [28, 40], [32, 48], [28, 48]], np.int32),
    "boxes": corners,
    "label": label,
    "epoch": np.zeros(4, np.int32),
    "index": np.arange(4, dtype=np.int32),
}
results = {}
for count in (1, 2):
    mesh = make_mesh(devices=jax.devices()[:count])

    @jax.jit
    def step(params, batch):
        def loss(params, batch, key):
            with use_mesh(mesh):
                model = nnx.merge(graph, params, rest)
                return TASKS["detection"].loss(model, batch, config, key=key)

        key = jax.random.key(0)
        prepared = TASKS["detection"].prepare_batch(batch, config, seed=0, key=key)
        return jax.value_and_grad(loss, has_aux=True)(params, prepared, key)

    (value, hits), gradients = step(nnx.to_pure_dict(params), put_batch(batch, mesh))
    results |= {f"on {count}/loss": value, f"on {count}/hits": hits}
    results |= {f"on {count}/{path}": leaf for path, leaf in named_leaves(gradients)}
np.savez(sys.argv[1], **results)
"""


@pytest.mark.process
def test_a_detectors_gradients_on_two_devices_match_one(tmp_path):
    """One device has six of the seven boxes: losses are divided by the boxes of both devices."""
    run_on_devices(2, _DETECTOR, tmp_path / "results.npz")
    # Biases of keys do not change a softmax: their gradients are only rounding, at most 1e-8.
    assert_same_results(np.load(tmp_path / "results.npz"), "on 1/", "on 2/", atol=1e-7)


_RESTORED = """
import dataclasses, pathlib, sys
import jax, numpy as np
from rope_jax.system import sharding
from rope_jax.system.sharding import put_batch
from rope_jax.training.folder import Run
from rope_jax.training.setup import initial_state, prepare, training_batches
from rope_jax.training.step import make_step
from rope_jax.training.trees import tree_hash
from tests.training.recipe import tiny

sharding.SMALLEST = 64
mix = {"mix__mixup": 0.8, "mix__cutmix": 1.0, "mix__groups": 6}  # across the parts of 4 devices
config = tiny(mesh__fsdp=2, ema_decay=0.9, **mix)
run, model = prepare(config)
run = dataclasses.replace(run, mesh=sharding.make_mesh(2, devices=jax.devices()[:4]))
assert dict(run.mesh.shape) == {"data": 2, "fsdp": 2}
workdir = pathlib.Path(sys.argv[1])

def steps(run, step, state, first, count):
    stream, _ = training_batches(run, first)
    losses = []
    for _ in range(count):
        state, metrics = step(state, put_batch(next(stream), run.mesh))
        losses.append(float(metrics["loss"]))
    return state, losses

step = make_step(run)
state, _ = steps(run, step, initial_state(run, model), 0, 3)
halved = lambda x: x.addressable_shards[0].data.size == x.size // 2
divided = {x.sharding for x in jax.tree.leaves(state["ema"]) if halved(x)}
assert divided and divided <= {x.sharding for x in jax.tree.leaves(state["opt"])}
results = {}
with Run.open(workdir, "train") as opened:
    opened.checkpoints.clean()
    opened.checkpoints.save(3, state, about=run.about())
    opened.checkpoints.wait()
    saved = tree_hash(state)
    for count, fsdp in ((2, 1), (8, 4), (4, 2), (1, 1)):
        mesh = sharding.make_mesh(fsdp, devices=jax.devices()[:count])
        part = dataclasses.replace(run, mesh=mesh)
        again = opened.resume(part, model)
        assert tree_hash(again) == saved, (count, fsdp)
        assert len(again["step"].sharding.device_set) == count
        if (count, fsdp) in ((4, 2), (1, 1)):
            own_step = step if count == 4 else make_step(part)
            results[f"{count}x{fsdp}"] = steps(part, own_step, again, 3, 4)[1]
np.savez(sys.argv[2], **results)
"""


@pytest.mark.process
def test_runs_resume_on_a_different_number_of_devices(tmp_path):
    """Restored states are equal bit for bit; later steps are equal up to the order of sums."""
    run_on_devices(8, _RESTORED, tmp_path / "run", tmp_path / "losses.npz")
    losses = np.load(tmp_path / "losses.npz")
    np.testing.assert_allclose(losses["4x2"], losses["1x1"], rtol=0, atol=5e-6)


TOGETHER = [
    "--config=configs/digits.py:epochs=1",
    "--config.model.options=depth=1,width=96",
    "--config.batch_size=120",
    "--config.log_every=1",
    "--config.eval.resolutions=((4, 6),)",
    "--config.eval.batch_size=100",
    "--config.mesh.fsdp=2",
    "--heartbeat=5",
]


@pytest.mark.process
def test_two_processes_match_one(tmp_path):
    """They share four devices."""
    for name, flags in (("one", [[]]), ("two[3e-3]", [["--distributed"], ["--distributed"]])):
        (tmp_path / name).mkdir()
        each = len(flags) * [environment(4 // len(flags))]
        running = start(tmp_path / name, flags, settings=TOGETHER, environments=each)
        assert not any(wait_for_exit(running)), outputs(running)
    assert "step" not in running[1].read_output()  # the second process prints no progress
    single, double = (tmp_path / name / "run" for name in ("one", "two[3e-3]"))
    lines = [read_metrics(workdir / "metrics.jsonl") for workdir in (single, double)]
    assert [line["step"] for line in lines[1]] == list(range(1, 13))
    for first, second in zip(*lines, strict=True):
        assert abs(first["loss"] - second["loss"]) <= 5e-6
        assert abs(first["accuracy"] - second["accuracy"]) < 1e-6  # the same examples, each once
    assert read_results(single) == read_results(double)


SHORT = [
    "--config=configs/digits.py:epochs=1",
    "--config.model.options=depth=1,width=16,heads=1",
    "--config.log_every=1",
    "--config.eval.resolutions=()",
]


def _stop_at_step_6():
    interrupt_at(pytest.MonkeyPatch(), 6)


@pytest.mark.process
def test_cpu_runs_resume_bit_for_bit_on_equal_devices(tmp_path):
    two, again = (tmp_path / name for name in ("two", "again"))
    for workdir, prepare in ((two, None), (again, _stop_at_step_6)):
        arguments = [*SHORT, f"--workdir={workdir}"]
        log, options = tmp_path / "log", {"environment": environment(2), "prepare": prepare}
        expect_end([Run(arguments, log, **options)], seconds=300)
    command = [sys.executable, "-m", "rope_jax.main", *SHORT, f"--workdir={again}"]
    advised = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}  # read when jax is imported
    subprocess.run(command, cwd=ROOT, env=advised, check=True, timeout=300)
    starts = [e for e in read_events(again / "metrics.jsonl") if e["event"] == "start"]
    assert [(e["step"], e["devices"]) for e in starts] == [(0, 2), (6, 2)]
    assert losses(again) == losses(two)
    assert len(losses(two)) == 11
