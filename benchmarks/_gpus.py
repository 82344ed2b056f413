"""Data sheets of GPUs that need not be present, as XLA's target descriptions."""

import os
import pathlib
import re

import jax
from jax.experimental import topologies

from rope_jax_kernels import device

H200, A100, L4, T4 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4", "Tesla T4"
B200 = "NVIDIA B200"
TARGET = pathlib.Path(__file__).parents[1] / "tests" / "data" / "h200.txtpb"

# Differences from the H200, except those in `device.KINDS`, from NVIDIA's data sheets and
# "Technical specifications per compute capability" in the CUDA programming guide.
KINDS = {
    H200: {},
    B200: {
        "core_count": 148,
        "l2_cache_size": 132644864,
        "memory_bandwidth": 8000000000000,
        "device_memory_size": 192000000000,
        "clock_rate_ghz": 1.965,
    },
    A100: {
        "core_count": 108,
        "fpus_per_core": 64,
        "shared_memory_per_core": 167936,
        "shared_memory_per_block_optin": 166912,
        "l2_cache_size": 41943040,
        "memory_bandwidth": 2039000000000,
        "device_memory_size": 85899345920,
        "clock_rate_ghz": 1.41,
    },
    L4: {
        "core_count": 58,
        "threads_per_core_limit": 1536,
        "shared_memory_per_core": 102400,
        "shared_memory_per_block_optin": 101376,
        "l2_cache_size": 50331648,
        "memory_bandwidth": 300000000000,
        "device_memory_size": 24000000000,
        "clock_rate_ghz": 2.04,
    },
    T4: {
        "core_count": 40,
        "fpus_per_core": 64,
        "threads_per_core_limit": 1024,
        "shared_memory_per_core": 65536,
        "shared_memory_per_block_optin": 65536,
        "l2_cache_size": 4194304,
        "memory_bandwidth": 320000000000,
        "device_memory_size": 16000000000,
        "clock_rate_ghz": 1.59,
    },
}


def absent_gpus(hosts: int = 1, gpus_per_host: int = 1, *, kind: str = H200) -> list[jax.Device]:
    """Devices to compile for; needs jax's CUDA plugin, but no GPU.

    Args:
        hosts: number of hosts.
        gpus_per_host: number of GPUs of each host.
        kind: of the GPUs, one of `KINDS`.

    Raises:
        RuntimeError: if JAX_SKIP_CUDA_CONSTRAINTS_CHECK is not set to 1.
    """
    description = describe(kind)
    if os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") != "1":
        raise RuntimeError(
            "there is no GPU; to compile for one set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 "
            "and install jax[cuda13]"
        )
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind.replace(" ", "_"),
        topology=f"1x{hosts}x{gpus_per_host}",
        target_config=description,
    ).devices


def describe(kind: str) -> str:
    """XLA's description of a kind of GPU, in the text format of its GpuTargetConfig."""
    major, minor = divmod(device.data_sheet(kind)[0], 10)
    text = TARGET.read_text().replace(H200, kind)
    # The capability's major and minor precede cuDNN's.
    for name, value in {"major": major, "minor": minor, **KINDS[kind]}.items():
        text = re.sub(rf"\b{name}: [\d.]+", f"{name}: {value}", text, count=1)
    return text
