"""The tests that a machine runs, and the cases of a sample."""

import collections
import itertools
import types

import jax
import pytest

from tests import conftest


@pytest.mark.parametrize(
    ("folder", "variable"),
    [("gpu", "ROPE_JAX_REHEARSE_GPU_TESTS"), ("aot", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK")],
)
def test_gpu_tests_are_collected_where_they_can_run(folder, variable, monkeypatch):
    monkeypatch.setattr(conftest, "_left_out", left_out := set())
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(conftest.importlib.util, "find_spec", lambda name: name == "jax_plugins")
    monkeypatch.delenv(variable, raising=False)
    assert conftest.pytest_ignore_collect(conftest.HERE / folder)
    assert f"tests/{folder}" in left_out.pop()
    monkeypatch.setenv(variable, "1")
    assert conftest.pytest_ignore_collect(conftest.HERE / folder) is None


def test_samples_are_reproducible_and_cover_all():
    tests = [f"a.py::many[{k}]" for k in range(8)] + [f"a.py::one_{k}" for k in range(4)]
    items = [types.SimpleNamespace(nodeid=name) for name in tests]
    drawn = [[x.nodeid for x in conftest.sample(items, 4, str(k))] for k in range(40)]
    assert drawn[7] == [item.nodeid for item in conftest.sample(items[::-1], 4, "7")]
    assert {(len(names), sum("many" in name for name in names)) for names in drawn} == {(3, 2)}
    counts = collections.Counter(itertools.chain(*drawn))
    assert counts.keys() == set(tests)
    assert max(counts.values()) < 25
