"""Fixtures of several of these tests."""

import pytest

from rope_jax.data.sources import scenes


@pytest.fixture
def few_scenes(monkeypatch):
    monkeypatch.setattr(scenes, "COUNTS", {"train": 12, "test": 6})
