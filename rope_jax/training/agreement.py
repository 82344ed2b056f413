"""Comparison of all processes of a run before its first step."""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from collections.abc import Iterator

import jax
from flax import nnx

from rope_jax.config import ConfigError, settings
from rope_jax.names import plugins
from rope_jax.system.processes import gather_texts
from rope_jax.training.setup import Setup, initial_state
from rope_jax.training.trees import first_problems, named_leaves, tree_hash

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pillow")
_OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl")


@contextlib.contextmanager
def report_failure() -> Iterator[None]:
    """Reports ConfigErrors of this context to the other processes, which end in `agree`."""
    try:
        yield
    except ConfigError as error:
        gather_texts(json.dumps({"failure": str(error)}))
        raise


def agree(facts: dict[str, str], workdir: pathlib.Path) -> None:
    """Compares facts, and the workdir, of all processes; all must call it.

    Args:
        facts: of this process.
        workdir: whose lock the first process has. Other processes must see it.

    Raises:
        ConfigError: in all processes, if one has failed before, or something differs.
    """
    path = workdir / ".lock"
    if jax.process_index() == 0:
        with path.open() as lock:
            os.fsync(lock.fileno())  # so that other machines can read it
    require_equal(facts)
    text = path.read_text().strip() if path.is_file() else "missing"
    require_equal({f"{path} (of --workdir)": text})


def describe_run(setup: Setup, model: nnx.Module) -> dict[str, str]:
    """Describes a run in this process: config, data, software, shapes of the state."""
    value = lambda name: repr(functools.reduce(getattr, name.split("."), setup.config))
    shapes = jax.eval_shape(lambda: initial_state(setup, model))
    leaves = "\n".join(f"{name} {x.dtype} {x.shape}" for name, x in named_leaves(shapes))
    return {
        **{f"--config.{name}": value(name) for name in settings()},
        **{f"the images of the {name} split": x for name, x in setup.fingerprint.items()},
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        **{name: str(getattr(jax.config, name)) for name in _OPTIONS},
        "the sources of rope_jax": _sources("rope_jax") + _sources("rope_jax_kernels"),
        **{f"the source of the plug-in {name}": _sources(name) for name in plugins.list_loaded()},
        "the state": _digest(leaves.encode()),
        "the kind of device": jax.local_devices()[0].device_kind,
    }


def require_equal(mine: dict[str, str]) -> None:
    """Compares the values of all processes with those of the first; all must call it.

    Raises:
        ConfigError: in all processes, if a value differs in one, or one has failed before.
    """
    first, *others = map(json.loads, gather_texts(json.dumps(mine)))
    problems = []
    for number, other in enumerate((first, *others)):
        if "failure" in other:
            raise ConfigError(f"process {number} failed: {other['failure']}")
        names = [name for name in first | other if first.get(name) != other.get(name)]
        if names:
            facts = [f"{name} is {other.get(name)}, not {first.get(name)}" for name in names]
            problems.append(f"in process {number} {first_problems(facts)}")
    if problems:
        raise ConfigError(
            f"the processes of a run differ from process 0: {first_problems(problems)}; "
            "start all with the same command, data and software, and a --workdir that all share "
            "[--distributed]"
        )


def require_equal_weights(model: nnx.Module) -> None:
    """Compares the initial weights with those of the first process, bit for bit.

    Raises:
        ConfigError: as `require_equal`.
    """
    if jax.process_count() > 1:
        weights = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        require_equal({"the hash of the initial weights": tree_hash(weights)})


def _sources(name: str) -> str:
    """A hash of the Python files of a module's package, or of the module's file."""
    module = sys.modules[name.partition(".")[0]]
    folders = [pathlib.Path(folder) for folder in getattr(module, "__path__", [])]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    paths = paths or [pathlib.Path(module.__file__)]
    return _digest(b"".join(path.read_bytes() for path in paths))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
