"""What every result says of where it comes from."""

import datetime
import json
import pathlib
import platform
from typing import Any

import jax
import numpy as np


def record(benchmark: str, settings: dict[str, Any], **figures: Any) -> dict[str, Any]:
    """A result with machine, versions and date."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"device": jax.devices()[0].device_kind, "platform": jax.default_backend(), "host": platform.platform()},
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "settings": {name: value for name, value in settings.items() if name != "out"},
    } | figures


def write(result: dict[str, Any], path: pathlib.Path | None) -> None:
    """Writes a result as JSON, whole or not at all; does nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=1) + "\n")
        temporary.replace(path)
