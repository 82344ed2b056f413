import json
import pathlib
from typing import Literal

import pytest

import benchmarks
from benchmarks import _runner
from benchmarks._gpus import A100, H200, KINDS, TARGET, absent_gpus, describe
from tests import postponed
from tests.refusals import expect_refusal

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
    arguments = ["b", "--turns=5", "--batches", "2", "4", "--short", f"--out={out}"]
    _runner.call("some", measure, [*arguments, "--", "--config.epochs=1"], "python -m some")
    result = json.loads(out.read_text())
    assert result["rows"] == ["b", "--config.epochs=1"]
    assert result["got"] == [5, None, [2, 4], True, "runs"]
    assert (result["benchmark"], result["settings"]) == ("some", {"turns": 5})
    assert result["machine"]["platform"] == "cpu"
    assert {"torch", "jax", "kernels"} <= set(result["versions"])


def test_optional_words_and_lists_are_options(tmp_path):
    out = tmp_path / "x.json"
    for argv, got in (([], [None, None]), (["--table=D.1", "--sizes", "1", "2"], ["D.1", [1, 2]])):
        _runner.call("some", postponed.measure, [*argv, f"--out={out}"], "python -m some")
        assert json.loads(out.read_text())["got"] == got


@pytest.mark.parametrize(
    ("function", "argv", "message"),
    [
        (measure, ["c"], "part: must be one of a, b, not 'c'"),
        (measure, ["a", "--turns=x"], "--turns: must be a whole number, not 'x'"),
        (measure, [], "required: part"),
        (lambda keep: None, ["--", "--x"], "unexpected arguments --x"),
    ],
)
def test_wrong_arguments_are_refused(function, argv, message, capsys):
    with expect_refusal(capsys, message):
        _runner.call("some", function, argv, "python -m some")


def test_earlier_results_are_continued_if_settings_match(tmp_path):
    out = tmp_path / "x.json"
    settings = {"turns": 5, "sizes": (1, 2)}
    result = _runner.record("some", settings, rows=[1])
    out.write_text(json.dumps(result))
    assert _runner.earlier_result(out, "some", settings)["rows"] == [1]
    others = [{"benchmark": "other"}, {"settings": {"turns": 6}}, {"machine": {"device": "x"}}]
    others += [{"versions": result["versions"] | {name: "1"}} for name in ("jax", "kernels")]
    for text in ("half a resu", *(json.dumps(result | other) for other in others)):
        out.write_text(text)
        assert _runner.earlier_result(out, "some", settings) == {}


def test_every_module_has_help(capsys):
    for path in pathlib.Path(benchmarks.__path__[0]).glob("[!_]*.py"):
        with pytest.raises(SystemExit, match="0"):
            _runner.main([path.stem, "--help"])
        assert f"usage: python -m benchmarks {path.stem}" in capsys.readouterr().out


def test_compiling_ahead_needs_a_variable(monkeypatch):
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    with pytest.raises(RuntimeError, match="set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1"):
        absent_gpus()


def test_each_kind_of_gpu_has_a_description():
    texts = {kind: describe(kind) for kind in KINDS}
    assert texts[H200] == TARGET.read_text()
    assert 'device_description_str: "NVIDIA A100' in texts[A100]
    assert "major: 8\n" in texts[A100]
    for kind, changed in KINDS.items():
        assert all(f"{name}: {value}\n" in texts[kind] for name, value in changed.items())
