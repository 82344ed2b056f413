"""GPUs other than the H200 of `benchmarks._gpus`, as XLA's target descriptions."""

import re

from benchmarks._gpus import H200, TARGET, absent_gpus

A100, L4, T4 = "NVIDIA A100-SXM4-80GB", "NVIDIA L4", "Tesla T4"
# How others differ from the H200: NVIDIA's data sheets, and "Technical specifications
# per compute capability" in the CUDA programming guide.
OTHERS = {
    A100: {
        "major": 8,
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
        "major": 8,
        "minor": 9,
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
        "major": 7,
        "minor": 5,
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


def absent_gpu(kind):
    """A GPU of a kind to compile for."""
    text = TARGET.read_text()
    for name, value in OTHERS.get(kind, {}).items():
        # The capability's major and minor precede cuDNN's.
        text, found = re.subn(rf"\b{name}: [\d.]+", f"{name}: {value}", text, count=1)
        assert found, name
    return absent_gpus(kind=kind, target=text.replace(H200, kind))[0]
