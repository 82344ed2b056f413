"""The suite: shares of time, parts that fail, and the summary."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import attention, models, rotary, startup, suite
from benchmarks._runner import arguments_of, call, parser_of, record, write

MODULES = {"attention": attention, "models": models, "rotary": rotary, "startup": startup}


def program(text):
    return [sys.executable, "-c", text]


def run_suite(*argv):
    call("suite", suite.run, argv, "python -m benchmarks suite")


def whole(name, left, **changed):
    """A result of a part by the suite's command, or with other arguments."""
    part = suite.PARTS[name]
    arguments = arguments_of(MODULES[part.benchmark].run, suite.options(part, "cpu")) | changed
    return record(part.benchmark, {}, arguments=arguments, rows=[], goals={}, left=left)


def running(stat):
    """Whether a process is there and no zombie, from /proc/PID/stat."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.process
def test_a_part_is_ended_with_all_that_it_started(tmp_path):
    child = tmp_path / "child"
    text = f"""
import pathlib, subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(child)!r}).write_text(str(started.pid))
print("what it has printed", flush=True)
time.sleep(600)
print("its end", flush=True)
"""
    assert suite.run_process(program(text), 2.0, tmp_path / "log") == "out of time"
    assert (tmp_path / "log").read_text() == "what it has printed\n"
    stat = pathlib.Path(f"/proc/{child.read_text()}/stat")
    end = time.monotonic() + 30
    while running(stat):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.process
def test_sigterm_ends_the_part_too(tmp_path):
    child = tmp_path / "child"
    text = f"""
import os, pathlib, time
pathlib.Path({str(child)!r}).write_text(str(os.getpid()))
time.sleep(60)
"""
    run = f"""
import pathlib, sys
from benchmarks import suite
suite.run_process([sys.executable, "-c", {text!r}], 60, pathlib.Path({str(tmp_path / "log")!r}))
"""
    end = time.monotonic() + 60
    with subprocess.Popen(program(run)) as process:
        while not (child.exists() and child.read_text()):
            assert time.monotonic() < end
            time.sleep(0.05)
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    assert not running(pathlib.Path(f"/proc/{child.read_text()}/stat"))


@pytest.mark.process
def test_what_does_not_listen_is_ended_too(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "GRACE_S", 0.3)
    text = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    assert suite.run_process(program(text), 1.0, tmp_path / "log") == "out of time"


@pytest.mark.process
def test_a_status_is_told(tmp_path):
    assert (
        suite.run_process(program("raise SystemExit(3)"), 60, tmp_path / "log")
        == "failed (status 3)"
    )
    assert suite.run_process(program(""), 60, tmp_path / "log") == "ok"


def test_parts_share_the_time_that_is_left_and_failures_end_nothing(tmp_path, monkeypatch, capsys):
    given = {}

    def run(command, seconds, log):
        name = log.stem.removesuffix("_cpu")
        given[name] = seconds
        if name == "attention":
            return "failed (status 1)"
        value = {"value": 1.25, "least": 1.0, "most": 2.0, "count": 3}
        write(
            record(name, {}, rows=[], goals={"K1": value} if name == "rotary" else {}),
            log.with_suffix(".json"),
        )
        return "ok"

    monkeypatch.setattr(suite, "run_process", run)
    with pytest.raises(SystemExit, match="no result of attention"):
        run_suite("--out", str(tmp_path), "--minutes", "9")
    shares = {name: part.share for name, part in suite.PARTS.items()}
    # No time passed in any of them: each has its share of all that the ones before it left.
    left = dict.fromkeys(shares)
    assert list(given) == list(shares)
    for place, name in enumerate(left):
        assert given[name] == pytest.approx(
            540 * shares[name] / sum(list(shares.values())[place:]), abs=5
        )
    printed = capsys.readouterr().out
    assert "failed (status 1), no result: see" in printed
    assert [line.split()[:2] for line in printed.splitlines() if line.startswith(("K1", "K2"))] == [
        ["K1", "1.25"],
        ["K2", "not"],
    ]
    parts = json.loads((tmp_path / "suite_cpu.json").read_text())["parts"]
    assert [part["written"] for part in parts] == [name != "attention" for name in shares]


def test_results_of_an_earlier_suite_are_not_taken_for_new_ones(tmp_path, monkeypatch):
    write(record("rotary", {}, rows=[], goals={}), tmp_path / "rotary_cpu.json")
    os.utime(tmp_path / "rotary_cpu.json", (1, 1))
    monkeypatch.setattr(suite, "run_process", lambda *_: "out of time")
    with pytest.raises(SystemExit, match="no result of rotary"):
        run_suite("--out", str(tmp_path), "--only", "rotary")


def test_complete_parts_are_not_measured_again(tmp_path, monkeypatch, capsys):
    for name, left in (("rotary", 0), ("attention", 3)):
        write(whole(name, left), tmp_path / f"{name}_cpu.json")
    ran = []

    def run(command, seconds, log):
        ran.append(command[3])
        assert seconds == pytest.approx(528, abs=5)  # all of the time
        write(record("attention", {}, rows=[], goals={}, left=1), log.with_suffix(".json"))
        return "ok"

    monkeypatch.setattr(suite, "run_process", run)
    run_suite("--out", str(tmp_path), "--only", "rotary", "attention")
    assert ran == ["attention"]
    printed = capsys.readouterr().out
    assert "complete" in printed
    assert "ok, 1 left" in printed


def test_other_results_in_the_same_file_are_not_the_suites(tmp_path):
    for changed, complete in (({}, True), ({"short": True}, False), ({"turns": 1}, False)):
        write(whole("rotary", 0, **changed), tmp_path / "rotary_cpu.json")
        assert bool(suite.finished("rotary", "cpu", tmp_path)) == complete
    write(whole("train", 0), tmp_path / "forward_cpu.json")
    assert not suite.finished("forward", "cpu", tmp_path)


def test_ours_beside_others():
    of = {"model": "vit", "position": "ape", "program": "forward", "dtype": "bfloat16", "batch": 8}
    forms = (("rope_jax", None, 2.0), ("rope_jax", "jnp", 5.0), ("timm", None, 3.0))
    models = [
        of | {"software": software, "implementation": how, "milliseconds": ms}
        for software, how, ms in forms
    ]
    what = "vit with ape, forward, bfloat16, batch 8"
    found = list(suite.peers({"benchmark": "models", "rows": models}))
    assert found == [
        (what, "jnp", "rope_jax", pytest.approx(2.5)),
        (what, "timm", "rope_jax", pytest.approx(1.5)),
    ]
    times = {"xla+rope": 6.0, "xla+bias": 9.0, "triton+rope": 2.0, "triton": 1.0, "cudnn": 4.0}
    rows = [{"model": "ViT", "direction": "forward", "microseconds": {"cold": times}}]
    found = {
        (other, mine): ratio
        for _, other, mine, ratio in suite.peers({"benchmark": "attention", "rows": rows})
    }
    assert found == {
        ("xla+rope", "triton+rope"): pytest.approx(3),
        ("cudnn", "triton"): pytest.approx(4),
    }
    peer = {"model": "ViT", "pattern": "global"}
    peers = [peer | {"microseconds": {"cold": {"triton": 2.0, "torch": 3.0}}}]
    assert list(suite.peers({"benchmark": "attention", "rows": [], "peers": peers})) == [
        ("ViT global, without position", "torch", "triton", pytest.approx(1.5))
    ]
    # Without kernels plain jax.numpy is ours; several sizes give their geometric mean.
    rows = [
        {"direction": "forward", "microseconds": {"hot": {"xla": 1.0, "eager": slow}}}
        for slow in (2.0, 8.0)
    ]
    assert list(suite.peers({"benchmark": "rotary", "rows": rows})) == [
        ("rotation forward, hot", "eager", "xla", pytest.approx(4.0))
    ]
    assert list(suite.peers({"benchmark": "startup", "rows": []})) == []


def test_every_part_is_a_benchmark_that_knows_its_arguments():
    for part in suite.PARTS.values():
        for platform in ("gpu", "cpu"):
            command = suite.command(part, platform, 100, pathlib.Path("x.json"))
            _, _, package, name, *arguments = command
            assert (package, name) == ("benchmarks", part.benchmark)
            args = parser_of(MODULES[name].run, "x").parse_args(arguments)
            assert args.out.name == "x.json"
            assert args.limit_s == 90


@pytest.mark.slow
def test_a_real_part(tmp_path, capsys):
    run_suite("--out", str(tmp_path), "--only", "attention", "--minutes", "2")
    assert json.loads((tmp_path / "attention_cpu.json").read_text())["rows"]
    assert "attention" in capsys.readouterr().out
