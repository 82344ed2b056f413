"""Several seeds in one run match separate runs up to rounding, on disk and in results."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

import rope_jax.runs.run
from rope_jax.commands import evaluate, report
from rope_jax.config import ConfigError
from rope_jax.data.sources import scenes
from rope_jax.evaluate import read_results, results_table
from rope_jax.tasks import seeds
from rope_jax.training.checkpoint import NonFinite
from rope_jax.training.metrics import progress_line, read_events, read_metrics, seed_metrics
from rope_jax.training.setup import initial_state, prepare, training_batches
from rope_jax.training.trees import tree_hash
from tests.devices import run_on_devices
from tests.refusals import expect_refusal
from tests.training.recipe import CEIT, advance, final_state, run, run_in_parts, start, tiny
from tests.training.test_segmentation import UPERNET

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


def read_rows(workdir):
    return read_results(workdir)["eval"]


def assert_close(result, reference):
    equal = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-6)
    jax.tree.map(equal, result, reference)


def second_member(state):
    """The part of the second seed in a joint state."""
    return seeds.split(state, 2)[1]


def test_seeds_take_the_steps_of_separate_runs(together, alone):
    joint_lines, alone_lines = (
        read_metrics(workdir / "metrics.jsonl") for workdir in (together, alone)
    )
    assert [line["step"] for line in joint_lines] == list(range(1, 9))
    for line, other in zip(joint_lines, alone_lines, strict=True):
        assert line["loss_seed5"] == pytest.approx(other["loss"], abs=5e-6)
        assert line["learning_rate"] == other["learning_rate"]
    assert_close(second_member(final_state(together, **BOTH)), final_state(alone, **ALONE[1]))
    assert joint_lines[-1]["loss_seed4"] != pytest.approx(joint_lines[-1]["loss_seed5"], abs=1e-3)


def test_streams_match_those_of_separate_seeds():
    changes = {"data__augment": "crop(pad=1)+flip", "data__repeats": 2}
    first = 10  # the next epoch begins within four steps
    joint, resident = training_batches(prepare(tiny(**BOTH | changes))[0], first)
    single = [training_batches(prepare(tiny(**each | changes))[0], first)[0] for each in ALONE]
    assert set(resident) == {"set"}
    for _ in range(4):
        expected = jax.tree.map(lambda *of_seeds: np.stack(of_seeds, 1), *map(next, single))
        jax.tree.map(np.testing.assert_array_equal, next(joint), expected)
        assert not np.array_equal(*np.moveaxis(expected["index"], 1, 0))


def steps(count=3, change=lambda state: state, **changes):
    """The state and the metrics after a few steps."""
    setup, state, step = start(**changes)
    return advance(setup, change(state), step, 0, count)


DROPPING = {"model__options": "depth=2,width=16,heads=1,drop_path=0.5"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        DROPPING | {"accumulate": 2, "data__augment": "flip+erase(p=0.5)", "non_finite": "skip"},
        DROPPING | {"mix__mixup": 0.8, "mix__cutmix": 1.0, "mix__groups": 4},
        CEIT | {"accumulate": 2, "optim__name": "lamb"},
        # Adam would amplify the rounding of gradients near 0 to full steps.
        UPERNET | {"optim__name": "sgd", "optim__learning_rate": 0.1},
    ],
    ids=["parts, erasing, drop path", "mixing", "batch statistics", "classes of pixels"],
)
def test_draws_and_states_match_separate_seeds(changes, monkeypatch):
    monkeypatch.setattr(scenes, "COUNTS", {"train": 24, "test": 12})
    (state, metrics), (alone_state, alone_metrics) = (
        steps(**BOTH | changes),
        steps(**ALONE[1] | changes),
    )
    assert_close({name: metrics[name][1] for name in metrics}, alone_metrics)
    assert_close(second_member(state), alone_state)


def test_every_seed_has_its_rows_of_results(together, alone):
    rows = read_rows(together)
    assert [(row["resolution"], row["seed"]) for row in rows] == [([8, 8], 4), ([8, 8], 5)]
    assert rows[1:] == [row | {"seed": 5} for row in read_rows(alone)]
    assert results_table(rows).splitlines()[2].split()[:2] == ["4", "8x8"]


def test_a_finished_run_is_not_evaluated_again(together, monkeypatch):
    monkeypatch.setattr(rope_jax.runs.run, "evaluate_state", None)
    run(together, **BOTH)


def test_one_seed_can_be_loaded(together, alone):
    model, config = rope_jax.load_checkpoint(str(together), seed=5)
    separate, separate_config = rope_jax.load_checkpoint(str(alone))
    assert config == separate_config
    assert_close(nnx.state(model, nnx.Param), nnx.state(separate, nnx.Param))
    assert rope_jax.load_checkpoint(str(together))[1].seed == 4
    for workdir, seed, words in (
        (together, 6, "seed=6, but the run has seeds 4 to 5"),
        (alone, 4, "seed=4, but the run has seed 5 alone"),
    ):
        with pytest.raises(ValueError, match=words):
            rope_jax.load_checkpoint(str(workdir), seed=seed)


def test_the_evaluation_command_accepts_a_seed(together, capsys):
    for seed in ([], ["--seed=5"], ["--seed=4"]):  # the last is the first, and is not new
        evaluate.main([str(together), "--resolutions=8", f"--out={together / 'rows.json'}", *seed])
    rows = json.loads((together / "rows.json").read_text())["rows"]
    assert [row["top1"] for row in rows] == [row["top1"] for row in read_rows(together)]
    assert [row["asked"]["seed"] for row in rows] == [4, 5]
    assert "seed 5, step 8" in capsys.readouterr().out
    with expect_refusal(capsys, r"seed=1, but the run has seeds 4 to 5.*\[WORKDIR\]"):
        evaluate.main([str(together), "--seed=1"])


def test_the_report_treats_seeds_as_runs(together, alone, tmp_path):
    first, last = report.read_runs(together)
    assert (first.config.seed, last.config.seed, last.config.seeds) == (4, 5, 1)
    (other,) = report.read_runs(alone)
    assert list(report.group_runs([first, other])) == ["rope_mixed"]  # of two workdirs
    assert last.metrics[-1]["loss"] == pytest.approx(other.metrics[-1]["loss"], abs=5e-6)
    assert "loss_std" not in last.metrics[-1]
    report.main([str(together), f"--out={tmp_path}"])
    mean = np.mean([row["top1"] for row in read_rows(together)])
    assert f"{100 * mean:.1f}<small>[" in (tmp_path / "report.html").read_text()


def test_the_progress_line_shows_mean_and_spread():
    values = {
        "loss": np.array([1.0, 2.0]),
        "accuracy": np.array([0.25, 0.75]),
        "learning_rate": np.array([0.1, 0.1]),
    }
    summary = seeds.summary(values, tiny(**BOTH).all_seeds)
    assert summary == {
        "loss": 1.5, "accuracy": 0.5, "learning_rate": 0.1, "loss_std": pytest.approx(0.5**0.5),
        "loss_seed4": 1.0, "loss_seed5": 2.0, "accuracy_seed4": 0.25, "accuracy_seed5": 0.75,
    }  # fmt: skip
    assert "loss 1.5000 +- 0.7071  accuracy 0.500" in progress_line(1, 10, summary)
    assert seed_metrics(summary, 5) == {"loss": 2.0, "accuracy": 0.75, "learning_rate": 0.1}


@pytest.mark.slow
def test_interrupted_seeds_resume_bit_for_bit(together, tmp_path):
    run_in_parts(tmp_path, 5, **BOTH)
    assert tree_hash(final_state(tmp_path, **BOTH)) == tree_hash(final_state(together, **BOTH))


def break_second_seed(state):
    """Sets a weight of the second member that makes its loss infinite."""
    kernel = state["params"]["head"]["kernel"]
    head = state["params"]["head"] | {"kernel": kernel.at[1].set(3e38)}
    return state | {"params": state["params"] | {"head": head}}


@pytest.mark.slow
def test_only_the_non_finite_seed_is_skipped_and_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        rope_jax.runs.run,
        "initial_state",
        lambda *arguments: break_second_seed(initial_state(*arguments)),
    )
    with pytest.raises(
        NonFinite,
        match=r"step 1 of seed 5: loss (nan|inf).*nothing was saved\. .* its examples: \d+, ",
    ):
        run(tmp_path / "stop", **BOTH)
    skipping = BOTH | {"non_finite": "skip", "log_every": 2, "epochs": 1.0}
    prepared, model = prepare(tiny(**skipping))
    before = break_second_seed(initial_state(prepared, model))
    hashes = lambda tree: [tree_hash(tree[name]) for name in ("params", "ema", "opt")]
    earlier = [hashes(tree) for tree in seeds.split(before, prepared.config.seeds)]
    after, _ = steps(2, change=break_second_seed, **skipping)  # the rate of the first is 0
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
def test_settings_incompatible_with_seeds_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny(**BOTH | changes)


def test_resuming_with_other_seeds_is_refused(together):
    with pytest.raises(ConfigError, match=r"another config \(seeds: 2 -> 3\)"):
        run(together, **BOTH | {"seeds": 3})


ON_TWO_DEVICES = """
import sys, numpy as np
from tests.training.test_seeds import BOTH, steps
_, metrics = steps(**BOTH)
np.save(sys.argv[1], metrics["loss"])
"""


@pytest.mark.process
def test_batches_of_all_seeds_are_split_over_devices(tmp_path):
    losses = []
    for devices in (1, 2):
        run_on_devices(devices, ON_TWO_DEVICES, tmp_path / "losses.npy")
        losses.append(np.load(tmp_path / "losses.npy"))
    np.testing.assert_allclose(*losses, rtol=0, atol=5e-6)
