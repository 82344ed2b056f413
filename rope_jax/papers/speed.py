"""The thesis' tables of speed, measured on this machine; a finished measurement is kept."""

import json
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax

from rope_jax.analysis.speed import images_per_second, rotation_sizes, time_rotation
from rope_jax.config import model_overrides
from rope_jax.papers.lab import Lab, Measured, single
from rope_jax.papers.runs import stand_in
from rope_jax.system.files import read_json, write_file
from rope_jax_kernels import device

K_ROPES = (1, 2, 4, 8)
ON_GPU = "fused kernels are timed on a GPU: run rope_jax reproduce {} there"


def _kept(lab: Lab, name: str, measure: Callable[[], Any]) -> Any:
    """A measurement on this device, from the workdir's file if it was made before."""
    path = lab.workdir / "speed.json"
    stored = read_json(path) if path.exists() else {}
    times = stored.setdefault(jax.devices()[0].device_kind, {})
    if name not in times:
        times[name] = measure()
        write_file(path, json.dumps(stored, indent=1) + "\n")
    return times[name]


def throughput(lab: Lab, key: Mapping[str, Any]) -> tuple[Measured | None, str]:
    """Tables 4.4 and D.1: images per second, or percent over RPB with the same kernel."""
    fused = key["kernel"] != "BMM"
    if fused and not device.is_gpu():
        return None, ON_GPU.format("thesis/table_4.4 thesis/table_D.1")
    speed = _speed(lab, key["model"], key["position"], fused)
    if key["quantity"] == "percent_over_rpb":
        speed = 100 * (speed / _speed(lab, key["model"], "rpb", fused) - 1)
    words = "a stand-in on a CPU: float32, batch 16"
    if device.is_gpu():
        choice = "; fused: the library's choice on this GPU" if fused else ""
        words = f"float16, batch 256{choice}"
    return single(speed), words


def _speed(lab: Lab, model: str, position: str, fused: bool) -> float:
    if device.is_gpu():
        name, options = model, {"batch": 256}
    else:
        small = stand_in(model)
        options = {"batch": 16, "image_size": small.side, "dtype": "float32", "turns": 3}
        size = small.tiny if lab.scale == "smoke" else small.small
        name, options = small.model, options | model_overrides(size)
    return _kept(
        lab,
        f"{name}, {position}, {'fused' if fused else 'BMM'}, {options}",
        lambda: images_per_second(name, position, fused=fused, **options),
    )


def speedup(lab: Lab, key: Mapping[str, Any]) -> tuple[Measured | None, str]:
    """Table A.2: the speed of one form of the rotation in percent of another's."""
    forms, k_rope = (key["form"], key["over"]), key.get("k_rope", 2)
    sizes = rotation_sizes(small=not device.is_gpu())
    times = [_rotation(lab, size, key["precision"], k_rope) for size in sizes]
    if not all(set(forms) <= one.keys() for one in times):
        return None, ON_GPU.format("thesis/table_A.2")
    # As printed: "compiled" is the change in percent, "fused" the ratio times 100.
    less = 100 if key["form"] == "compiled" else 0
    ratios = [100 * one[key["over"]] / one[key["form"]] - less for one in times]
    number = {"average": statistics.fmean, "least": min, "most": max}[key["quantity"]](ratios)
    return single(number), f"{len(sizes)} sizes" + ("" if device.is_gpu() else ", on a CPU")


def _rotation(lab: Lab, size: tuple, precision: str, k_rope: int) -> dict[str, float]:
    name = f"rotation {'x'.join(map(str, size))}, {precision}, k_rope={k_rope}"
    return _kept(lab, name, lambda: time_rotation(size, precision, k_rope=k_rope))
