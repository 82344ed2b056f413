"""GPUs that need not be there: their data sheets, as XLA's target descriptions."""

import os
import pathlib

import jax
from jax.experimental import topologies

H200 = "NVIDIA H200"
TARGET = pathlib.Path(__file__).parents[1] / "tests" / "data" / "h200.txtpb"


def absent_gpus(
    hosts: int = 1, gpus_per_host: int = 1, *, kind: str = H200, target: str | None = None
) -> list[jax.Device]:
    """Devices to compile for; needs jax's CUDA plugin, but no GPU.

    Args:
        hosts: number of hosts.
        gpus_per_host: number of GPUs of each host.
        kind: of the GPUs.
        target: XLA's description of this kind, in the text format of its GpuTargetConfig; None for
            that of an H200.

    Raises:
        RuntimeError: if JAX_SKIP_CUDA_CONSTRAINTS_CHECK is not set to 1.
    """
    if os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") != "1":
        raise RuntimeError(
            "there is no GPU; to compile for one set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 "
            "and install jax[cuda13]"
        )
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind.replace(" ", "_"),
        topology=f"1x{hosts}x{gpus_per_host}",
        target_config=target or TARGET.read_text(),
    ).devices
