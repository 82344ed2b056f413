"""The command for a machine with a GPU: its steps, its time, and how it continues."""

import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from benchmarks import attention, gpu, suite
from benchmarks._runner import arguments_of, call, record, write
from rope_jax import tune
from tests.gpu import conftest

ROOT = pathlib.Path(__file__).parents[2]


def run_gpu(*argv):
    call("gpu", gpu.run, argv, "python -m benchmarks gpu")


@pytest.fixture
def started(monkeypatch):
    """Names and seconds of the steps that are started; their statuses can be set."""
    found, statuses = [], {}

    def run(command, seconds, log):
        name = log.stem.removesuffix("_cpu")
        found.append((name, seconds))
        return statuses.get(name, "ok")

    monkeypatch.setattr(gpu, "run_process", run)
    monkeypatch.setattr(gpu.os, "environ", dict(os.environ))
    found_and_statuses = type("Started", (), {"steps": found, "statuses": statuses})
    return found_and_statuses


def test_every_file_of_gpu_tests_is_run():
    names = [path.stem.removeprefix("test_gpu_") for path in ROOT.glob("tests/gpu/test_*.py")]
    assert sorted(gpu.TESTS) == sorted(names)


def test_the_commands_are_understood(tmp_path):
    steps = gpu.steps(tmp_path, "gpu", rehearse=False)
    assert steps[0].name == "tests"
    assert len({step.name for step in steps}) == 1 + len(gpu.MODELS)
    for step, (model, _, batch, training) in zip(steps[1:], gpu.MODELS, strict=True):
        assert step.command[1:3] == ["-m", "rope_jax.tune"]
        asked = tune.parse(step.command[3:])
        assert (asked.model, asked.batch, asked.train) == (model, batch, training)
        assert asked.seconds < step.least_s


def test_steps_follow_each_other_and_a_second_call_continues(tmp_path, started, capsys):
    started.statuses["tests"] = "failed (status 1)"  # of single tests
    started.statuses["tune_deit3_s16_axial_rope"] = "failed (status 2)"
    options = ["--rehearse", f"--out={tmp_path}", "--limit-s=300"]
    run_gpu(*options)
    names = ["tests", "tune_deit3_s16_axial_rope", "suite"]
    assert [name for name, _ in started.steps] == names
    assert all(seconds < 300 - suite.GRACE_S for _, seconds in started.steps)
    printed = capsys.readouterr().out
    assert "tune_deit3_s16_axial_rope: failed (status 2): see " in printed
    assert "suite: not complete: attention" in printed
    assert printed.endswith("repeat the command to continue\n")

    started.steps.clear()
    started.statuses.clear()
    found = record("attention", {}, arguments=arguments_of(attention.run, []), rows=[], left=0)
    write(found, tmp_path / "attention_cpu.json")
    run_gpu(*options)
    assert [name for name, _ in started.steps] == names[1:]  # the tests are complete
    assert capsys.readouterr().out.endswith("complete\n")
    started.steps.clear()
    run_gpu(*options)
    assert started.steps == []


def test_nothing_starts_without_enough_time(tmp_path, started, capsys):
    run_gpu("--rehearse", f"--out={tmp_path}", "--limit-s=20")
    assert started.steps == []
    assert "tests: no time was left" in capsys.readouterr().out


def test_results_of_a_cpu_are_not_those_of_a_gpu(tmp_path, started):
    with pytest.raises(SystemExit, match="jax runs on cpu: --rehearse"):
        run_gpu(f"--out={tmp_path}")
    run_gpu("--rehearse", f"--out={tmp_path}", "--limit-s=300")
    files = [path.name for path in tmp_path.iterdir() if path.is_file()]
    assert files == ["gpu_cpu.json"]
    assert json.loads((tmp_path / "gpu_cpu.json").read_text())["machine"]["platform"] == "cpu"


def test_outcomes_are_counted(tmp_path):
    path = tmp_path / "tests.jsonl"
    lines = [("a", "started"), ("a", "passed"), ("b", "started"), ("b", "failed"), ("c", "started")]
    text = "".join(json.dumps({"test": x, "outcome": y}) + "\n" for x, y in lines)
    path.write_text(text + '{"test": "d", "outc')
    assert gpu.outcomes(path) == "tests: 1 failed, 1 passed\n  failed: b"
    assert gpu.outcomes(tmp_path / "none") == "tests: none"


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path):
    path = tmp_path / "tests.jsonl"
    path.write_text('{"test": "a", "outc')
    conftest.Outcomes(path).write(test="b", outcome="passed")
    assert gpu.read_outcomes(path) == [{"test": "b", "outcome": "passed"}]


@pytest.mark.parametrize("keywords", [{"gpu"}, {"slow"}])
def test_only_gpu_tests_have_a_time_limit(keywords, monkeypatch):
    limits = []
    timer = types.SimpleNamespace(
        dump_traceback_later=lambda limit, **_: limits.append(limit),
        cancel_dump_traceback_later=lambda: limits.append(None),
    )
    monkeypatch.setattr(conftest, "faulthandler", timer)
    run = conftest.pytest_runtest_protocol(types.SimpleNamespace(keywords=keywords))
    next(run)
    with pytest.raises(StopIteration, match="result"):
        run.send("result")
    assert limits == ([conftest.TEST_S, None] if keywords == {"gpu"} else [])


@pytest.mark.slow
@pytest.mark.process
def test_gpu_tests_can_be_rehearsed_and_are_not_repeated(tmp_path):
    """One that interprets no kernel."""
    path = tmp_path / "tests.jsonl"
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_gpu_limits.py", "-q", "-p",
               "no:cacheprovider", "-k", "on_the_cpu", "-n", "1", "--dist", "loadgroup",
               f"--outcomes={path}"]  # fmt: skip
    environment = os.environ | {"ROPE_JAX_REHEARSE_GPU_TESTS": "1"}
    for status in (0, 5):  # 5: no test is left
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout
    entries = list(map(json.loads, path.read_text().splitlines()))
    assert [entry["outcome"] for entry in entries] == ["started", "passed"]
