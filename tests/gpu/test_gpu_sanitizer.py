"""The kernels under NVIDIA's compute-sanitizer, where it is installed."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.gpu import sanitized
from tests.gpu.conftest import TEST_S

pytestmark = pytest.mark.gpu

ROOT = pathlib.Path(__file__).parents[2]
SANITIZER = "compute-sanitizer"
FOUND = 99  # exit status if the sanitizer finds an error
# What the sanitizer prints where it cannot work, for instance in some virtual machines.
UNSUPPORTED = ("Device not supported", "Unable to attach", "No attachable process found")


PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])


# A process for each kernel: the sanitizer slows them down, and a test has a time limit.
@pytest.mark.parametrize("place", range(len(sanitized.RUNS)), ids=map(str, sanitized.RUNS))
@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "synccheck"])
def test_no_errors_are_found(tool, place):
    if (command := shutil.which(SANITIZER, path=PLACES)) is None:
        pytest.skip(f"{SANITIZER} is not installed")
    # Each array has an allocation of its own, so that what is beside it is not allocated.
    own = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment = os.environ | own | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    done = subprocess.run(
        [command, f"--tool={tool}", f"--error-exitcode={FOUND}", sys.executable, "-m",
         "tests.gpu.sanitized", str(place)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TEST_S - 20,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    if done.returncode and (reason := next((x for x in UNSUPPORTED if x in printed), None)):
        pytest.skip(f"{SANITIZER}: {reason}")
    assert done.returncode == 0, printed[-4000:]
    assert f"{sanitized.RUNS[place]} has run" in printed
