import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks
from benchmarks import _goals, _rotations, _timing, rotary
from benchmarks._runner import main
from rope_jax_kernels import rotate_by_angles


def test_the_sizes_are_those_of_the_thesis():
    cases = list(rotary.cases(short=False))
    assert len(cases) == 300 * 3 * 2
    assert len({(c.batch, c.heads, c.side, c.channels) for c in cases}) == 300


def test_every_beginning_has_sizes_of_all_kinds():
    """First those of the goals."""
    first = rotary.cases(short=False)[:300]
    assert {(case.precision, case.direction) for case in first} == {("16-32", "forward")}
    ordered = sorted(case.moved_bytes for case in first)
    for count in (16, 64, 150):
        some = sorted(case.moved_bytes for case in first[:count])
        for share in (0.1, 0.5, 0.9):
            place = ordered.index(some[int(share * count)]) / 300
            assert place == pytest.approx(share, abs=0.1)


def test_equal_problems_have_one_shape():
    one, four = (
        rotary.Case(2, 1, 14, 32, "16-32", "forward"),
        rotary.Case(2, 4, 7, 32, "16-32", "forward"),
    )
    assert one.shape == four.shape == (2, 1, 196, 32)
    assert one.moved_bytes == 196 * (
        2 * 32 * 2 + 8 * 4
    )  # half of 32 channels of 2 bytes read and written, twice; 8 angles of 4
    x, theta = (
        jax.random.normal(jax.random.key(0), (2, 4, 49, 32)),
        jax.random.normal(jax.random.key(1), (4, 49, 8)),
    )
    turn = jax.jit(functools.partial(rotate_by_angles, layout="BNLD"))
    rows = turn(x.reshape(one.shape), theta.reshape(1, 196, 8))
    np.testing.assert_array_equal(rows.reshape(x.shape), turn(x, theta))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_all_forms_compute_the_same(direction):
    case = rotary.Case(2, 3, 2, 32, "32-32", direction)
    x = jax.random.normal(jax.random.key(0), case.shape)
    results = []
    for form in ("xla", "eager"):
        angles = rotary.operands(case, form, 1)[1:]
        results.append(jax.jit(rotary.step_of(case, form))(x, *angles))
    np.testing.assert_allclose(*results, atol=1e-6)
    (theta,) = angles
    back = 1 if direction == "forward" else -1
    np.testing.assert_allclose(
        results[0], rotate_by_angles(x, back * theta, layout="BNLD"), atol=1e-6
    )


def test_the_loop_applies_the_step_as_often_as_it_says():
    case = rotary.Case(1, 1, 2, 32, "32-32", "forward")
    (x, y), *angles = rotary.operands(case, "xla", 2)
    step = rotary.step_of(case, "xla")
    expected = x
    for _ in range(6):
        expected = step(expected, *angles)
    loop = _timing.compile_loop(step, lambda: rotary.operands(case, "xla", 2), 3, 2)
    assert loop.steps == 3 * 2 * 2
    np.testing.assert_allclose(loop.run((jnp.copy(x), y), *angles)[0], expected, atol=1e-5)
    assert loop.timer()() > 0


@pytest.mark.slow
def test_all_ways_to_pack_agree(monkeypatch):
    monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")
    keys = jax.random.split(jax.random.key(0), 3)
    gradients = [tuple(jax.random.normal(key, (2, 5, 3, 8)) for key in keys)] * 2
    coords, freqs = jnp.linspace(-1, 1, 5)[:, None], jnp.linspace(1, 10, 9).reshape(3, 1, 3)
    results = [
        _rotations.pack_all(pack, gradients, coords, freqs) for pack in _rotations.PACKS.values()
    ]
    assert [len(result) for result in results] == [2, 2, 2]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=1e-6)


@pytest.mark.slow
def test_what_only_a_gpu_measures_runs(monkeypatch):
    """In interpret mode, where times mean nothing."""
    monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")
    monkeypatch.setattr(_rotations, "PEER_SHAPES", [(1, 5, 2, 8)])
    monkeypatch.setattr(_rotations, "PACK_SHAPES", [(1, 5, 2, 8)])
    monkeypatch.setattr(_rotations, "PEER_ROUNDS", 1)
    monkeypatch.setattr(_rotations, "torch_on_gpu", lambda: False)
    (peer,) = _rotations.peer_rows(["triton"], turns=1)
    assert (peer["shape"], peer["temperature"], set(peer["microseconds"])) == (
        (1, 5, 2, 8),
        "hot",
        {"xla", "triton"},
    )
    packs = list(_rotations.pack_rows(turns=1, copies=1))
    assert [(row["pairs"], set(row["microseconds"])) for row in packs] == [
        (2, set(_rotations.PACKS)),
        (4, set(_rotations.PACKS)),
    ]


def test_both_peers_turn_the_same():
    q, k = jax.random.normal(jax.random.key(0), (2, 2, 5, 3, 16))
    coords, freqs = jnp.linspace(0, 1, 5)[:, None], jnp.linspace(1, 10, 4)
    tables = jnp.cos(coords * freqs)[:, None], jnp.sin(coords * freqs)[:, None]
    rotate = jax.jit(_rotations.rotate_both, static_argnums=0)
    expected = rotate(None, (q, k), coords, freqs[None, None])
    np.testing.assert_allclose(rotate("xla", (q, k), *tables), expected, atol=1e-6)


def figures(rows, **others):
    return {"rows": rows, "peers": [], "packs": []} | others


def row(moved_bytes, hot, cold=None, channels=64, **others):
    temperatures = {"hot": hot} | ({"cold": cold} if cold else {})
    return {
        "precision": "16-32",
        "direction": "forward",
        "channels": channels,
        "ideal_us": moved_bytes / 1e6,
        "empty_us": 2.0,
        "microseconds": temperatures,
    } | others


def test_goals():
    rows = [
        row(
            30_000_000, {"xla": 50.0, "triton": 10.0, "eager": 400.0}, {"xla": 64.0, "triton": 40.0}
        ),
        row(
            15_000_000, {"xla": 40.0, "triton": 20.0, "eager": 100.0}, {"xla": 36.0, "triton": 30.0}
        ),
        row(900_000, {"xla": 3.0, "triton": 3.0, "eager": 60.0}, channels=32),
        row(99, {"xla": 1.0, "triton": 9.0, "eager": 1.0}, precision="16-16"),
    ]
    peers = [
        {"shape": (1, 2), "temperature": "hot", "microseconds": {"torch": 9.0, "triton": 1.0}},
        {"shape": (1, 2), "temperature": "cold", "microseconds": {"torch": 3.0, "triton": 2.0}},
        {"shape": (1, 1), "temperature": "hot", "microseconds": {"torch": 3.0, "triton": 1.0}},
        {"shape": (1, 3), "temperature": "hot", "microseconds": {"xla": 3.0, "triton": 1.0}},
    ]
    packs = [{"microseconds": {"separate": 8.0, "xla": 5.0, "triton": 4.0}}]
    found = rotary.goals(figures(rows, peers=peers, packs=packs), "triton")
    values = {name: (goal["value"], goal["least"], goal["count"]) for name, goal in found.items()}
    assert values == {
        "K1": (pytest.approx((1.6 * 1.2 * 1.0) ** (1 / 3)), 1.0, 3),
        "K2": (pytest.approx((1.6 * 1.2) ** (1 / 2)), pytest.approx(1.2), 2),
        "K3": (pytest.approx(0.75), pytest.approx(0.75), 1),
        "K4": (pytest.approx(1.5), 1.5, 1),
        "K5": (pytest.approx((40 + 5 + 20) / 3), 5.0, 3),
        "K6": (pytest.approx((1.5 * 3.0) ** (1 / 2)), 1.5, 2),
        "K7": (pytest.approx(2.0), 2.0, 1),
    }
    assert set(found) == {goal.name for goal in _goals.GOALS if goal.name.startswith("K")}


def test_goals_without_a_kernel_are_not_measured():
    assert rotary.goals(figures([row(900_000, {"xla": 3.0, "eager": 60.0})]), "triton") == {}


def test_goals_leave_out_rows_without_all_forms():
    whole = {"xla": 30.0, "triton": 10.0, "eager": 50.0}
    parts = [{name: us for name, us in whole.items() if name != form} for form in whole]
    found = rotary.goals(figures([row(15_000_000, times) for times in (whole, *parts)]), "triton")
    assert {name: goal["count"] for name, goal in found.items()} == {"K1": 2, "K2": 2, "K5": 1}


def test_a_form_that_fails_is_left_out(monkeypatch):
    def fail(case):
        raise MemoryError("too large")

    monkeypatch.setattr(rotary, "eager_timer", fail)
    case, limits = rotary.Case(1, 1, 2, 32, "16-32", "forward"), {"launch_us": 1e3}
    _, left_out, eager = rotary.prepare(case, [], 1.0, limits | {"copy_gb_per_s": 1e3})
    assert (left_out, eager) == ({"eager": "MemoryError: too large"}, None)


def test_a_result_tells_where_it_comes_from(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rotary, "SHORT", ((1,), (3,), (7,), (32,)))
    assert (
        main(benchmarks, ["rotary", "--turns=1", "--loop-us=50", f"--out={tmp_path / 'r.json'}"])
        == 0
    )
    result = json.loads((tmp_path / "r.json").read_text())
    about = {"benchmark", "date", "machine", "versions", "settings"}
    assert about | {"limits", "rows", "peers", "packs", "goals", "left"} <= set(result)
    assert len(result["rows"]) == 6
    assert result["left"] == 0
    assert all(value > 0 for row in result["rows"] for value in row["microseconds"]["hot"].values())
    printed = capsys.readouterr().out
    assert "eager / xla" in printed
    assert printed.count("not measured") == 7  # K1 to K7, on a CPU


def test_a_second_call_measures_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(rotary, "SHORT", ((1,), (3,), (7, 14), (32,)))
    monkeypatch.setattr(
        rotary, "machine_limits", lambda turns: {"copy_gb_per_s": 1e3, "launch_us": 1}
    )
    nothing = {"microseconds": {"hot": {"xla": 2.0}}, "graphs": {}, "left_out": {}}
    monkeypatch.setattr(rotary, "measure", lambda *_: nothing)
    monkeypatch.setattr(rotary, "prepare", lambda case, *_: (prepared.append(case), {}, None))
    out, rows = tmp_path / "r.json", []
    for options in (["--limit-s=0"], [], [], ["--turns=2"]):
        prepared = []
        assert main(benchmarks, ["rotary", f"--out={out}", *options]) == 0
        result = json.loads(out.read_text())
        rows.append((len(prepared), len(result["rows"]), result["left"]))
    assert rows == [(1, 1, 1), (11, 12, 0), (0, 12, 0), (12, 12, 0)]
