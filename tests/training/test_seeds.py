"""Several seeds in one run: each as if trained alone, to rounding, on disk and in results."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

import rope_jax.runs.run
from rope_jax.commands import evaluate, report
from rope_jax.config import ConfigError
from rope_jax.evaluate import read_results, results_table
from rope_jax.system.sharding import put_batch
from rope_jax.tasks import seeds
from rope_jax.training.checkpoint import NonFinite
from rope_jax.training.metrics import progress_line, read_events, read_metrics, seed_metrics
from rope_jax.training.setup import initial_state, prepare, training_batches
from rope_jax.training.step import make_step
from rope_jax.training.trees import tree_hash
from tests.devices import run_on_devices
from tests.refusals import refused
from tests.training.recipe import CEIT, final_state, run, run_in_parts, tiny

RECIPE = {
    "seed": 4,
    "epochs": 0.7,
    "data__on_device": True,
    "data__augment": "crop(pad=1)+erase(p=0.5)",
    "ema_decay": 0.9,
    "eval__resolutions": (),
    "checkpoint_every": 100,
}
BOTH = RECIPE | {"seeds": 2}
ALONE = [RECIPE | {"seed": seed} for seed in (4, 5)]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("together")
    run(workdir, **BOTH)
    return workdir


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The second seed alone."""
    workdir = tmp_path_factory.mktemp("alone")
    run(workdir, **ALONE[1])
    return workdir


def rows_of(workdir):
    return read_results(workdir)["eval"]


def close(ours, theirs):
    equal = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-6)
    jax.tree.map(equal, ours, theirs)


def second(state):
    """The part of the second seed in a state of both."""
    return seeds.split(state, 2)[1]


def test_each_seed_takes_the_steps_that_it_would_take_alone(together, alone):
    ours, theirs = (read_metrics(workdir / "metrics.jsonl") for workdir in (together, alone))
    assert [line["step"] for line in ours] == list(range(1, 9))
    for line, other in zip(ours, theirs, strict=True):
        assert line["loss_seed5"] == pytest.approx(other["loss"], abs=5e-6)
        assert line["learning_rate"] == other["learning_rate"]
    close(second(final_state(together, **BOTH)), final_state(alone, **ALONE[1]))
    assert ours[-1]["loss_seed4"] != pytest.approx(ours[-1]["loss_seed5"], abs=1e-3)


def test_the_streams_are_those_of_the_seeds():
    changes = {"data__augment": "crop(pad=1)+flip", "data__repeats": 2}
    first = 10  # the next epoch begins within four steps
    both, resident = training_batches(prepare(tiny(**BOTH | changes))[0], first)
    single = [training_batches(prepare(tiny(**each | changes))[0], first)[0] for each in ALONE]
    assert set(resident) == {"set"}
    for _ in range(4):
        wanted = jax.tree.map(lambda *of_seeds: np.stack(of_seeds, 1), *map(next, single))
        jax.tree.map(np.testing.assert_array_equal, next(both), wanted)
        assert not np.array_equal(*np.moveaxis(wanted["index"], 1, 0))


def steps(count=3, start=lambda state: state, **changes):
    """The state and the metrics after a few steps."""
    prepared, model = prepare(tiny(**changes))
    state, step = start(initial_state(prepared, model)), make_step(prepared)
    batches, resident = training_batches(prepared, 0)
    for _ in range(count):
        state, metrics = step(state, put_batch(next(batches), prepared.mesh) | resident)
    return state, metrics


DROPPING = {"model__options": "depth=2,width=16,heads=1,drop_path=0.5"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        DROPPING | {"accumulate": 2, "data__augment": "flip+erase(p=0.5)", "non_finite": "skip"},
        DROPPING | {"mix__mixup": 0.8, "mix__cutmix": 1.0, "mix__groups": 4},
        CEIT | {"accumulate": 2, "optim__name": "lamb"},
    ],
    ids=["parts, erasing, drop path", "mixing", "batch statistics"],
)
def test_all_that_is_drawn_and_all_that_is_kept_is_the_seeds_own(changes):
    (state, metrics), (theirs, their_metrics) = steps(**BOTH | changes), steps(**ALONE[1] | changes)
    close({name: metrics[name][1] for name in metrics}, their_metrics)
    close(second(state), theirs)


def test_every_seed_has_its_rows(together, alone):
    rows = rows_of(together)
    assert [(row["resolution"], row["seed"]) for row in rows] == [([8, 8], 4), ([8, 8], 5)]
    assert rows[1:] == [row | {"seed": 5} for row in rows_of(alone)]
    assert results_table(rows).splitlines()[2].split()[:2] == ["4", "8x8"]


def test_a_finished_run_is_not_evaluated_again(together, monkeypatch):
    monkeypatch.setattr(rope_jax.runs.run, "evaluate_state", None)
    run(together, **BOTH)


def test_one_of_the_models_is_loaded(together, alone):
    model, config = rope_jax.load_checkpoint(str(together), seed=5)
    theirs, their_config = rope_jax.load_checkpoint(str(alone))
    assert config == their_config
    close(nnx.state(model, nnx.Param), nnx.state(theirs, nnx.Param))
    assert rope_jax.load_checkpoint(str(together))[1].seed == 4
    for workdir, seed, words in (
        (together, 6, "seed=6, but the run has seeds 4 to 5"),
        (alone, 4, "seed=4, but the run has seed 5 alone"),
    ):
        with pytest.raises(ValueError, match=words):
            rope_jax.load_checkpoint(str(workdir), seed=seed)


def test_the_command_of_evaluation_takes_a_seed(together, capsys):
    for seed in ([], ["--seed=5"], ["--seed=4"]):  # the last is the first, and is not new
        evaluate.main([str(together), "--resolutions=8", f"--out={together / 'rows.json'}", *seed])
    found = json.loads((together / "rows.json").read_text())["rows"]
    assert [row["top1"] for row in found] == [row["top1"] for row in rows_of(together)]
    assert [row["asked"]["seed"] for row in found] == [4, 5]
    assert "seed 5, step 8" in capsys.readouterr().out
    with refused(capsys, r"seed=1, but the run has seeds 4 to 5.*\[WORKDIR\]"):
        evaluate.main([str(together), "--seed=1"])


def test_the_report_takes_seeds_for_runs(together, alone, tmp_path):
    one, two = report.read_runs(together)
    assert (one.config.seed, two.config.seed, two.config.seeds) == (4, 5, 1)
    (other,) = report.read_runs(alone)
    assert list(report.group_runs([one, other])) == ["rope_mixed"]  # of two workdirs
    assert two.metrics[-1]["loss"] == pytest.approx(other.metrics[-1]["loss"], abs=5e-6)
    assert "loss_std" not in two.metrics[-1]
    report.main([str(together), f"--out={tmp_path}"])
    mean = np.mean([row["top1"] for row in rows_of(together)])
    assert f"{100 * mean:.1f}<small>[" in (tmp_path / "report.html").read_text()


def test_a_line_tells_mean_and_spread():
    values = {
        "loss": np.array([1.0, 2.0]),
        "accuracy": np.array([0.25, 0.75]),
        "learning_rate": np.array([0.1, 0.1]),
    }
    told = seeds.summary(values, tiny(**BOTH).all_seeds)
    assert told == {
        "loss": 1.5, "accuracy": 0.5, "learning_rate": 0.1, "loss_std": pytest.approx(0.5**0.5),
        "loss_seed4": 1.0, "loss_seed5": 2.0, "accuracy_seed4": 0.25, "accuracy_seed5": 0.75,
    }  # fmt: skip
    assert "loss 1.5000 +- 0.7071  accuracy 0.500" in progress_line(1, 10, told)
    assert seed_metrics(told, 5) == {"loss": 2.0, "accuracy": 0.75, "learning_rate": 0.1}


@pytest.mark.slow
def test_interrupted_is_uninterrupted_bit_for_bit(together, tmp_path):
    run_in_parts(tmp_path, 5, **BOTH)
    assert tree_hash(final_state(tmp_path, **BOTH)) == tree_hash(final_state(together, **BOTH))


def broken(state):
    """The state, with a weight of the second member that its loss cannot bear."""
    kernel = state["params"]["head"]["kernel"]
    head = state["params"]["head"] | {"kernel": kernel.at[1].set(3e38)}
    return state | {"params": state["params"] | {"head": head}}


@pytest.mark.slow
def test_a_seed_that_is_not_finite_is_skipped_alone_and_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        rope_jax.runs.run, "initial_state", lambda *given: broken(initial_state(*given))
    )
    with pytest.raises(
        NonFinite,
        match=r"step 1 of seed 5: loss (nan|inf).*nothing was saved\. .* its examples: \d+, ",
    ):
        run(tmp_path / "stop", **BOTH)
    skipping = BOTH | {"non_finite": "skip", "log_every": 2, "epochs": 1.0}
    prepared, model = prepare(tiny(**skipping))
    before = broken(initial_state(prepared, model))
    hashes = lambda tree: [tree_hash(tree[name]) for name in ("params", "ema", "opt")]
    earlier = [hashes(tree) for tree in seeds.split(before, prepared.config.seeds)]
    after, _ = steps(2, start=broken, **skipping)  # the rate of the first is 0
    later = [hashes(tree) for tree in seeds.split(after, prepared.config.seeds)]
    assert later[1] == earlier[1]
    assert not set(later[0]) & set(earlier[0])
    with pytest.raises(NonFinite, match=r"step 11 of seed 5: .* after 10 skipped steps in a row"):
        run(tmp_path / "skip", **skipping)
    events = read_events(tmp_path / "skip" / "metrics.jsonl")
    skipped = [(event["step"], event["seed"]) for event in events if event["event"] == "skipped"]
    assert skipped == [(step, 5) for step in range(1, 11)]
    assert "step 3 of seed 5: loss" in capsys.readouterr().err


def test_all_seeds_start_from_the_same_weights(together):
    config = tiny(**BOTH | {"init_from": str(together), "model__num_classes": 20})
    params = rope_jax.runs.run.start(*prepare(config))["params"]
    loaded, _ = rope_jax.load_checkpoint(str(together))
    np.testing.assert_array_equal(params["norm"]["scale"], 2 * [loaded.norm.scale[...]])
    # A head for other classes is fresh, and each seed has its own.
    assert not np.array_equal(*params["head"]["kernel"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data__on_device": False},
            r"seeds=2 needs the images on the device: add --config.data.on_device=True",
        ),
        ({"mesh__fsdp": 2}, r"seeds=2 cannot be combined with --config.mesh.fsdp=2"),
        ({"seed": 2**32 - 1}, "seeds=2 from --config.seed=4294967295 on reach beyond .*: use a"),
        ({"seeds": 0}, "seeds must be a whole number of at least 1, not 0"),
    ],
)
def test_what_seeds_cannot_go_with_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny(**BOTH | changes)


def test_a_run_of_other_seeds_is_refused_on_resume(together):
    with pytest.raises(ConfigError, match=r"another config \(seeds: 2 -> 3\)"):
        run(together, **BOTH | {"seeds": 3})


ON_TWO_DEVICES = """
import sys, numpy as np
from tests.training.test_seeds import BOTH, steps
_, metrics = steps(**BOTH)
np.save(sys.argv[1], metrics["loss"])
"""


@pytest.mark.process
def test_batches_of_all_seeds_are_divided_over_devices(tmp_path):
    found = []
    for devices in (1, 2):
        run_on_devices(devices, ON_TWO_DEVICES, tmp_path / "losses.npy")
        found.append(np.load(tmp_path / "losses.npy"))
    np.testing.assert_allclose(*found, rtol=0, atol=5e-6)
