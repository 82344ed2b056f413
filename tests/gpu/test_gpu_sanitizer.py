"""The kernels under NVIDIA's compute-sanitizer, if it is installed."""

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
# Messages of a sanitizer that cannot work, for instance in some virtual machines.
UNSUPPORTED = ("Device not supported", "Unable to attach", "No attachable process found")


PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])


# A process for each kernel: the sanitizer slows them down, and a test has a time limit.
@pytest.mark.parametrize("place", range(len(sanitized.RUNS)), ids=map(str, sanitized.RUNS))
@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "synccheck"])
def test_the_sanitizer_finds_no_errors(tool, place):
    if (command := shutil.which(SANITIZER, path=PLACES)) is None:
        pytest.skip(f"{SANITIZER} is not installed")
    # Each array has a separate allocation, so that adjacent memory is not allocated.
    allocation = {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    environment = os.environ | allocation | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
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
