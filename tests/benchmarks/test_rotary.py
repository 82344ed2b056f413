import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import rotary
from benchmarks.__main__ import main


def test_the_sizes_are_those_of_the_thesis():
    cases = list(rotary.cases(short=False))
    assert len(cases) == 300 * 3 * 2
    assert len({(c.batch, c.heads, c.side, c.channels) for c in cases}) == 300


def test_backward_is_the_gradient():
    case = rotary.Case(2, 3, 2, 32, "32-32", "backward")
    (x,), theta = rotary.operands(case, 1)
    forward = rotary.step_of(rotary.Case(2, 3, 2, 32, "32-32", "forward"), "xla")
    cotangent = jax.random.normal(jax.random.key(0), x.shape)
    expected = jax.vjp(lambda y: forward(y, theta), x)[1](cotangent)[0]
    np.testing.assert_allclose(rotary.step_of(case, "xla")(cotangent, theta), expected, atol=1e-6)


def test_the_loop_applies_the_step_as_often_as_it_says():
    case = rotary.Case(1, 1, 2, 32, "32-32", "forward")
    (x, y), theta = rotary.operands(case, 2)
    step = rotary.step_of(case, "xla")
    expected = x
    for _ in range(5):
        expected = step(expected, theta)
    out = rotary.compile_loop(step, case, 5, 2)((jnp.copy(x), y), theta)
    np.testing.assert_allclose(out[0], expected, atol=1e-5)


def test_a_result_tells_where_it_comes_from(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rotary, "SHORT", ((1,), (3,), (7,), (32,)))
    assert main(["rotary", "--turns=1", "--loop-us=50", f"--out={tmp_path / 'r.json'}"]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert {"benchmark", "date", "machine", "versions", "settings", "limits", "rows"} <= set(result)
    assert len(result["rows"]) == 6
    assert all(value > 0 for row in result["rows"] for value in row["microseconds"]["hot"].values())
    assert "eager / jnp" in capsys.readouterr().out


def test_unknown_benchmarks_are_listed(capsys):
    assert main(["rotari"]) == 2
    assert "neighborhood, rotary" in capsys.readouterr().err


@pytest.mark.parametrize(("values", "mean"), [([1.0, 4.0], 2.0), ([2.0], 2.0)])
def test_geometric_mean(values, mean):
    assert rotary.geometric_mean(values) == pytest.approx(mean)
