"""Batch statistics: trained, saved, loaded, and those of the whole batch on many devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.config import ConfigError
from rope_jax.data.images.device import normalise
from rope_jax.evaluate import read_results
from rope_jax.system.sharding import put_batch
from rope_jax.training.setup import initial_state, prepare, training_batches
from rope_jax.training.step import make_step
from rope_jax.training.trees import named_leaves, tree_hash
from rope_jax.weights import export_state_dict
from rope_jax.weights.own import OWN
from tests.devices import run_on_devices
from tests.training.recipe import CEIT, accuracy, final_state, run, run_in_two_parts, started, tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("ceit")
    run(workdir, **CEIT)
    return workdir


def test_the_step_updates_weights_and_statistics():
    config = tiny(**CEIT)
    prepared, model = prepare(config)
    state = initial_state(prepared, model)
    batch = put_batch(next(training_batches(prepared, 0)[0]), prepared.mesh)
    new, metrics = make_step(prepared)(jax.tree.map(jnp.copy, state), batch)
    graph, variables = nnx.split(model)

    @jax.jit
    def reference(variables):
        model = nnx.merge(graph, variables)
        images = normalise(batch["image"], config.data.mean, config.data.std)
        logits = model(images, train=True, key=jax.random.key(0))  # one block: drop path is 0
        loss = -jax.nn.log_softmax(logits)[jnp.arange(120), batch["label"]].mean()
        return loss, nnx.state(model, nnx.BatchStat)

    loss, stats = reference(variables)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert set(new) == {"step", "params", "opt", "ema", "stats"}
    wanted = named_leaves(nnx.to_pure_dict(stats))
    assert len(wanted) == 2 * (1 + 3)
    for (name, ours), (_, theirs), (_, before) in zip(
        named_leaves(new["stats"]), wanted, named_leaves(state["stats"]), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=name)
        assert (np.asarray(ours) != before).any(), name


@pytest.mark.slow
def test_the_loaded_model_has_the_statistics_and_scores_what_the_run_reported(finished):
    model, config = rope_jax.load_checkpoint(str(finished))
    stats = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    assert tree_hash(stats) == tree_hash(final_state(finished, **CEIT)["stats"])
    assert all((np.asarray(leaf) != 0).any() for _, leaf in named_leaves(stats))
    (row,) = read_results(finished)["eval"]
    assert accuracy(model, config, row["resolution"]) == pytest.approx(row["top1"], abs=1e-9)


def test_averaged_weights_stand_beside_the_running_statistics(finished):
    averaged, last = (rope_jax.load_checkpoint(str(finished), ema=ema)[0] for ema in (True, False))
    assert not np.array_equal(averaged.head.kernel[...], last.head.kernel[...])
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.state(averaged, nnx.BatchStat),
        nnx.state(last, nnx.BatchStat),
    )


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_statistics(finished, tmp_path):
    run_in_two_parts(tmp_path, 3, **CEIT)
    assert tree_hash(final_state(tmp_path, **CEIT)) == tree_hash(final_state(finished, **CEIT))


def test_init_from_takes_statistics_along(finished, tmp_path):
    trained, _ = rope_jax.load_checkpoint(str(finished))
    np.savez(tmp_path / "weights.npz", **export_state_dict(trained, source=OWN))
    for source in (finished, tmp_path / "weights.npz"):
        model = started(source, **CEIT)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(trained))
    weights = dict(np.load(tmp_path / "weights.npz"))
    del weights["patch_embed.bn.mean"]
    np.savez(tmp_path / "less.npz", **weights)
    with pytest.raises(ConfigError, match=r"patch_embed\.bn\.mean is missing"):
        started(tmp_path / "less.npz", **CEIT)


_ON_DEVICES = """
import dataclasses, sys
import jax, numpy as np
from rope_jax import data
from rope_jax.system.sharding import make_mesh, put_batch
from rope_jax.system.sharding import put_batch
from rope_jax.training.setup import initial_state, prepare, training_batches
from rope_jax.training.step import make_step
from rope_jax.training.trees import named_leaves
from tests.training.recipe import CEIT, tiny

run, model = prepare(tiny(**CEIT | {"batch_size": 16}))
assert run.mesh.size == 8
found = {}
for devices in (1, 8):
    mesh = make_mesh(devices=jax.devices()[:devices])
    part = dataclasses.replace(run, mesh=mesh)
    state = jax.tree.map(jax.numpy.copy, initial_state(part, model))  # steps donate it
    step = make_step(part)
    for _, batch in zip(range(3), data.batches(run.images, batch_size=16, seed=0)):
        batch = put_batch(batch, mesh)
        shards = batch["image"].addressable_shards
        assert [shard.data.shape[0] for shard in shards] == [16 // devices] * devices
        state, metrics = step(state, batch)
    assert state["stats"]["patch_embed"]["bn"]["mean"].sharding.is_fully_replicated
    found[f"{devices}.loss"] = metrics["loss"]
    found |= {f"{devices}.{name}": leaf for name, leaf in named_leaves(state["stats"])}
np.savez(sys.argv[1], **found)
"""


@pytest.mark.process
def test_statistics_on_eight_devices_are_those_of_one(tmp_path):
    run_on_devices(8, _ON_DEVICES, tmp_path / "found.npz")
    found = np.load(tmp_path / "found.npz")
    assert len(found.files) == 2 * (1 + 8)
    for name in (name for name in found.files if name.startswith("8.")):
        # Sums in another order. The statistics of an eighth of the batch differ in the first digit.
        np.testing.assert_allclose(
            found[name], found[f"1.{name[2:]}"], rtol=1e-4, atol=1e-6, err_msg=name
        )
