"""Several devices of a CPU."""

import os


def environment(count: int) -> dict[str, str]:
    """Variables of a process that has `count` of them, beside the flags of all tests."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
