"""Keeps one kernel that hangs or breaks the device from hiding the results of other tests."""

import collections
import contextlib
import faulthandler
import json
import os
import pathlib
import sys
import warnings

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
        config.pluginmanager.register(LeftOut(config.workerinput.get("known_tests", ())))
    elif path := config.getoption("outcomes"):
        config.pluginmanager.register(Outcomes(path))


def read_outcomes(path):
    """The outcomes in a file of tests; a line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


class LeftOut:
    """Leaves out tests by name."""

    def __init__(self, names):
        self.names = set(names)

    @pytest.hookimpl(trylast=True)  # pytest-xdist appends the group to the name of a test
    def pytest_collection_modifyitems(self, config, items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.names])
        items[:] = [item for item in items if item.nodeid not in self.names]


class Outcomes(LeftOut):
    """Writes outcomes as they come. Tests that have one are left out."""

    def __init__(self, path):
        self.path = path
        if path.exists() and not path.read_bytes().endswith(b"\n"):  # a line that was cut off
            with path.open("a") as file:
                file.write("\n")
        found = read_outcomes(path)
        known = {entry["test"] for entry in found if entry["outcome"] != "started"}
        starts = collections.Counter(
            entry["test"] for entry in found if entry["outcome"] == "started"
        )
        # The time limit also ends the process of a test, but hardly twice of the same one.
        fatal = {name for name in starts.keys() - known if starts[name] >= 2}
        for name in sorted(fatal):
            self.write(test=name, outcome="failed", reason="it ended its process twice", seconds=0)
        super().__init__(known | fatal)

    def write(self, **entry):
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["known_tests"] = sorted(self.names)

    def pytest_runtest_logstart(self, nodeid):
        self.write(test=nodeid, outcome="started")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            reason = "" if report.outcome == "passed" else str(report.longrepr)[-2000:]
            seconds = round(getattr(report, "duration", 0.0), 2)
            self.write(test=report.nodeid, outcome=report.outcome, reason=reason, seconds=seconds)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Ends the process if a GPU test does not end; pytest-xdist then starts another one."""
    if "gpu" not in item.keywords:  # pytest calls this hook for the tests of all folders
        return (yield)
    faulthandler.dump_traceback_later(TEST_S, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Ends the process after a failure that the device does not survive."""
    report = yield
    if report.failed and not REHEARSING and not device_answers():
        print(f"{item.nodeid} broke the device:\n{report.longrepr}", file=sys.__stderr__)
        os._exit(1)
    return report


def device_answers():
    """Whether the device still computes."""
    try:
        return float(jax.block_until_ready(jnp.zeros(()) + 1)) == 1
    except Exception:  # whatever a broken device raises
        return False


@pytest.fixture(autouse=True)
def _rehearsed(monkeypatch):
    if REHEARSING:
        monkeypatch.setenv("ROPE_JAX_INTERPRET", "1")
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
