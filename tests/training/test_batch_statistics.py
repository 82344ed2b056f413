"""Batch statistics: trained, saved, loaded, and computed over the whole batch on many devices."""

import jax
import numpy as np
import pytest
from flax import nnx

import rope_jax
from rope_jax.config import ConfigError
from rope_jax.evaluate import read_results
from rope_jax.training.trees import tree_hash
from rope_jax.weights import export_state_dict
from rope_jax.weights.own import OWN
from tests.devices import run_on_devices
from tests.training.recipe import (
    CEIT,
    accuracy,
    final_state,
    run,
    start_from,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("ceit")
    run(workdir, **CEIT)
    return workdir


@pytest.mark.slow
def test_loaded_models_have_the_statistics_and_scores_of_the_run(finished):
    """The average of the weights and the last ones have the same statistics."""
    expected = tree_hash(final_state(finished, **CEIT)["stats"])
    for ema in (False, True):
        model, config = rope_jax.load_checkpoint(str(finished), ema=ema)
        assert tree_hash(nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))) == expected
    (row,) = read_results(finished)["eval"]
    assert accuracy(model, config, row["resolution"]) == pytest.approx(row["top1"], abs=1e-9)


def test_init_from_includes_statistics(finished, tmp_path):
    trained, _ = rope_jax.load_checkpoint(str(finished))
    weights = export_state_dict(trained, source=OWN)
    np.savez(tmp_path / "weights.npz", **weights)
    for source in (finished, tmp_path / "weights.npz"):
        model = start_from(source, **CEIT)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(trained))
    del weights["patch_embed.bn.mean"]
    np.savez(tmp_path / "less.npz", **weights)
    with pytest.raises(ConfigError, match=r"patch_embed\.bn\.mean is missing"):
        start_from(tmp_path / "less.npz", **CEIT)


_ON_DEVICES = """
import dataclasses, sys
import jax, numpy as np
from rope_jax import data
from rope_jax.system.sharding import make_mesh, put_batch
from rope_jax.training.setup import initial_state, prepare, training_batches
from rope_jax.training.step import make_step
from rope_jax.training.trees import named_leaves
from tests.training.recipe import CEIT, tiny

run, model = prepare(tiny(**CEIT | {"batch_size": 16}))
assert run.mesh.size == 8
results = {}
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
    results[f"{devices}.loss"] = metrics["loss"]
    results |= {f"{devices}.{name}": leaf for name, leaf in named_leaves(state["stats"])}
np.savez(sys.argv[1], **results)
"""


@pytest.mark.process
def test_statistics_on_eight_devices_match_one(tmp_path):
    run_on_devices(8, _ON_DEVICES, tmp_path / "results.npz")
    results = np.load(tmp_path / "results.npz")
    assert len(results.files) == 2 * (1 + 8)
    for name in (name for name in results.files if name.startswith("8.")):
        # Sums in another order. The statistics of an eighth of the batch differ in the first digit.
        np.testing.assert_allclose(
            results[name], results[f"1.{name[2:]}"], rtol=1e-4, atol=1e-6, err_msg=name
        )
