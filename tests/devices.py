"""Several devices of a CPU."""

import os
import subprocess
import sys


def environment(count: int) -> dict[str, str]:
    """Environment variables for `count` devices, in addition to the flags of all tests."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}


def run_on_devices(count: int, program: str, *arguments: object) -> None:
    """Runs a program in a separate process with `count` devices."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    subprocess.run(command, env=os.environ | environment(count), check=True, timeout=300)
