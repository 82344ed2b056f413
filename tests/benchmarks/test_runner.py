import json
import pathlib
import subprocess
import sys
from typing import Literal

import pytest

import benchmarks
import experiments
from benchmarks import _runner, models
from benchmarks._goals import GOALS, geometric_mean, goal_table, spread
from benchmarks._gpus import absent_gpus
from tests import postponed

ONE = [1]


def measure(
    keep,
    part: Literal["a", "b"],
    *flags: str,
    turns: int = 3,
    image_size: int | None = None,
    batches: list[int] = ONE,
    short: bool = False,
    workdir: pathlib.Path = pathlib.Path("runs"),
    out: pathlib.Path | None = None,
):
    """Measures.

    Args:
        keep: writes the result.
        turns: 100 % of them
    """
    got = [turns, image_size, batches, short, str(workdir)]
    keep(rows=[part, *flags], got=got, settings={"turns": turns}, versions={"torch": "9"})
    assert out is not None


def test_a_function_is_a_command(tmp_path):
    out = tmp_path / "new" / "x.json"
    own = ["b", "--turns=5", "--batches", "2", "4", "--short", f"--out={out}"]
    _runner.call("some", measure, [*own, "--", "--config.epochs=1"], "python -m some")
    result = json.loads(out.read_text())
    assert result["rows"] == ["b", "--config.epochs=1"]
    assert result["got"] == [5, None, [2, 4], True, "runs"]
    assert result["benchmark"] == "some"
    assert result["settings"] == {"turns": 5}
    assert result["versions"]["torch"] == "9"
    assert result["machine"]["platform"] == "cpu"
    assert {"date", "versions"} <= set(result)


def test_a_word_or_none_and_a_list_or_none_are_options(tmp_path):
    out = tmp_path / "x.json"
    for argv, got in (([], [None, None]), (["--table=D.1", "--sizes", "1", "2"], ["D.1", [1, 2]])):
        _runner.call("some", postponed.measure, [*argv, f"--out={out}"], "python -m some")
        assert json.loads(out.read_text())["got"] == got
    with pytest.raises(SystemExit):
        _runner.call("some", postponed.measure, ["--table=5"], "python -m some")


@pytest.mark.parametrize("table", ["4.4", "D.1"])
def test_the_tables_of_natten_are_options(table):
    assert _runner.arguments_of(models.run, ["--table", table])["table"] == table


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["c"], "invalid choice: 'c'"), (["a", "--turns=x"], "invalid int value"), ([], "required")],
)
def test_wrong_arguments_are_refused(argv, message, capsys):
    with pytest.raises(SystemExit):
        _runner.call("some", measure, argv, "python -m some")
    assert message in capsys.readouterr().err


def test_an_earlier_result_is_continued_if_it_is_of_the_same(tmp_path):
    out = tmp_path / "x.json"
    assert _runner.earlier(out, "some", {}) == {}
    assert _runner.earlier(None, "some", {}) == {}
    settings = {"turns": 5, "sizes": (1, 2)}
    _runner.write(_runner.record("some", settings | {"limit_s": 9}, rows=[1]), out)
    assert _runner.earlier(out, "some", settings)["rows"] == [1]
    assert _runner.earlier(out, "other", settings) == {}
    assert _runner.earlier(out, "some", settings | {"turns": 6}) == {}
    result = json.loads(out.read_text())
    for part, name in (("versions", "jax"), ("versions", "kernels"), ("machine", "device")):
        out.write_text(json.dumps(result | {part: result[part] | {name: "another"}}))
        assert _runner.earlier(out, "some", settings) == {}
    out.write_text("half a resu")
    assert _runner.earlier(out, "some", settings) == {}


@pytest.mark.process
def test_a_benchmark_ends_at_its_limit_whatever_it_does(tmp_path):
    out = tmp_path / "x.json"
    text = f"""
import time
from benchmarks import _runner
from benchmarks._gpus import absent_gpus
_runner.GRACE_S = 0.2
def busy(keep, *, limit_s: float = 9.0):
    keep(rows=[1])
    time.sleep(60)
_runner.call("some", busy, ["--limit-s=0.3", "--out={out}"], "python -m some")
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert "ended while busy: --limit-s=0.3" in done.stdout
    assert json.loads(out.read_text())["rows"] == [1]


def test_flags_need_a_benchmark_that_takes_them(capsys):
    with pytest.raises(SystemExit):
        _runner.call("some", lambda keep: None, ["--", "--x"], "python -m some")
    assert "unexpected arguments --x" in capsys.readouterr().err


@pytest.mark.parametrize("package", [benchmarks, experiments])
def test_every_module_has_a_help_text(package, capsys):
    for path in pathlib.Path(package.__path__[0]).glob("[!_]*.py"):
        with pytest.raises(SystemExit, match="0"):
            _runner.main(package, [path.stem, "--help"])
        assert f"usage: python -m {package.__name__} {path.stem}" in capsys.readouterr().out


def test_goals():
    assert {goal.name[0] for goal in GOALS} == set("KAMTS")
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert spread([1.0, 4.0]) == {
        "value": pytest.approx(2.0),
        "least": 1.0,
        "most": 4.0,
        "count": 2,
    }
    table = goal_table({"K1": spread([1.5]), "S2": {"value": 9.0}}, "KS")
    assert table.count("not measured") == 6 + 2
    assert "K1 1.50 1.50 1.50" in " ".join(table.split())


def test_compiling_ahead_needs_a_variable(monkeypatch):
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    with pytest.raises(RuntimeError, match="set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1"):
        absent_gpus()
