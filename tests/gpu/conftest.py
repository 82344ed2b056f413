"""Prevents a kernel that hangs or breaks the device from hiding results of other tests."""

import contextlib
import faulthandler
import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

from tests.gpu.programs import REHEARSING

TEST_S = 240  # of one test, compilation included


def pytest_addoption(parser):
    parser.addoption(
        "--outcomes", type=pathlib.Path, help="file to which each GPU test's outcome is appended"
    )


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # a process of pytest-xdist, which collects by itself
        config.pluginmanager.register(DeselectKnown(config.workerinput.get("known_tests", ())))
    elif path := config.getoption("outcomes"):
        config.pluginmanager.register(Outcomes(path))


class DeselectKnown:
    """Deselects tests by name."""

    def __init__(self, names):
        self.names = set(names)

    @pytest.hookimpl(trylast=True)  # pytest-xdist appends the group to the name of a test
    def pytest_collection_modifyitems(self, config, items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.names])
        items[:] = [item for item in items if item.nodeid not in self.names]


class Outcomes(DeselectKnown):
    """Writes outcomes as they come. Tests with an outcome are deselected."""

    def __init__(self, path):
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else ()
        known = set()
        for line in lines:
            with contextlib.suppress(ValueError):  # a truncated line
                known.add(json.loads(line)["test"])
        super().__init__(known)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["known_tests"] = sorted(self.names)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            entry = {"test": report.nodeid, "outcome": report.outcome}
            entry["reason"] = "" if report.outcome == "passed" else str(report.longrepr)[-2000:]
            entry["seconds"] = round(getattr(report, "duration", 0.0), 2)
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Ends the process after a failure that the device does not survive."""
    report = yield
    if report.failed and not REHEARSING and not device_answers():
        print(f"{item.nodeid} broke the device:\n{report.longrepr}", file=sys.__stderr__)
        os._exit(1)
    return report


def device_answers():
    """True if the device still computes."""
    try:
        return float(jax.block_until_ready(jnp.zeros(()) + 1)) == 1
    except Exception:  # whatever a broken device raises
        return False


@pytest.fixture(autouse=True)
def _limited():
    """Ends the process if a test does not end; pytest-xdist then starts another one."""
    faulthandler.dump_traceback_later(TEST_S, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _rehearsed(monkeypatch):
    if REHEARSING:
        monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")
