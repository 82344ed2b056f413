"""Measured choices of implementations and tiles, and which of them serves a call that names none.

`record` notes calls, `tune` measures them, and the `Choices` that it returns are used by every call
with `implementation=None` that is traced inside `with choices:`. Elsewhere such a call on a GPU
uses the choices that `Choices.remember` wrote to the user's cache folder, or those that ship with
this package in `measured/`, for this kind of device, version of jax and sources of the kernels.

Both contexts take part in the caches of `jax.jit`: a function is traced again in another context.
A trace cannot see whether it will be differentiated: the choice that was measured with gradients
serves a call, and where there is none, the one that was measured without them.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
from typing import Any

import jax

from rope_jax_kernels import device, dispatch
from rope_jax_kernels.tuning.record import call_key

PACKAGE = pathlib.Path(__file__).parents[1]
SHIPPED = PACKAGE / "measured"

_IN_FORCE = jax.make_user_context(None)


def cache_folder() -> pathlib.Path:
    """The folder of remembered choices: `kernels` in $ROPE_JAX_CACHE, else in rope_jax of
    $XDG_CACHE_HOME or ~/.cache.

    Raises:
        RuntimeError: neither variable is set and the user has no home folder.
    """
    if chosen := os.environ.get("ROPE_JAX_CACHE"):
        return pathlib.Path(chosen) / "kernels"
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(caches, "rope_jax", "kernels")


@functools.cache
def hash_sources() -> str:
    """Computes a short hash of this package's sources; with others, measurements are void."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def file_name(kind: str, version: str, sources: str) -> str:
    """The file of a kind of device, a version of jax and of the kernels, in either folder.

    >>> file_name("NVIDIA H200", "0.11.2", "0a1b2c3d")
    'nvidia_h200-jax0.11.2-0a1b2c3d.json'
    """
    return f"{slugify(kind)}-jax{version}-{sources}.json"


def slugify(kind: str) -> str:
    """Converts a kind of device to a word for file names.

    >>> slugify("NVIDIA H200")
    'nvidia_h200'
    """
    return re.sub("[^a-z0-9]+", "_", kind.lower())


@dataclasses.dataclass(frozen=True)
class Choice:
    """An implementation, and the sizes of its tiles."""

    implementation: str
    tile: dispatch.TileSizes = ()

    @property
    def name(self) -> str:
        """For tables: "triton", or "triton forward=64x32x4x2x1" with other tiles than planned."""
        sizes = [f"{part}={'x'.join(map(str, size))}" for part, size in self.tile]
        return " ".join([self.implementation, *sizes])


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of one call, with its gradients or without them.

    Attributes:
        choice: the fastest correct candidate.
        default: name of the candidate that is used without a measurement.
        microseconds: name of each candidate that was timed -> median of one call.
        left_out: name of each other candidate -> the reason.
    """

    choice: Choice
    default: str
    microseconds: dict[str, float]
    left_out: dict[str, str]


@dataclasses.dataclass(eq=False)
class Choices:
    """Measured choices of implementations and tiles for one kind of device.

    Inside `with choices:`, calls traced with `implementation=None` use these choices and nothing
    from the cache folder. Calls that were not measured, and all on another kind of device or with
    changed kernels, use the built-in preferences. `Choices()` has none.

    Example:
        >>> from rope_jax_kernels import Choices
        >>> with Choices():  # built-in preferences, whatever the cache folder holds
        ...     pass

    Attributes:
        device: kind of the device, as jax names it.
        jax: version of jax.
        calls: call (`Call.key`) -> `Call.direction` -> measurements.
        everywhere: an implementation for every call that it serves, or None.
        sources: of the kernels that were measured, see `hash_sources`.
    """

    device: str = ""
    jax: str = jax.__version__
    calls: dict[str, dict[str, Measured]] = dataclasses.field(default_factory=dict)
    everywhere: str | None = None
    sources: str = dataclasses.field(default_factory=hash_sources)

    def __post_init__(self):
        self._entered = []

    def __enter__(self) -> "Choices":
        context = _IN_FORCE(self)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def misfit(self) -> str | None:
        """The reason why the choices do not apply to the target's calls, or None."""
        if self.device not in ("", device.kind()):
            return f"measured on another kind of device, {self.device}"
        if self.calls and self.sources != hash_sources():
            return "measured with other sources of the kernels"
        return None

    def of(self, key: str) -> Choice | None:
        """The choice for a call on the target device, or None."""
        if self.everywhere is not None:
            return Choice(self.everywhere)
        directions = self.calls.get(key, {})
        measured = directions.get("training") or directions.get("forward")
        if measured is not None and (reason := self.misfit()):
            _say_once(f"choices are not used: they were {reason}")
            return None
        return measured and measured.choice

    def to_json(self) -> str:
        """The choices as text; `from_json` reads it."""
        return json.dumps({"format": 1} | dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Choices":
        """The inverse of `to_json`.

        Raises:
            ValueError: the text is damaged, or of another format.
        """
        try:
            content = json.loads(text)
            if content["format"] != 1:
                raise ValueError(f"format {content['format']!r}; this version reads 1")
            calls = {
                key: {name: _parse_measured(**fields) for name, fields in directions.items()}
                for key, directions in content["calls"].items()
            }
            optional = {name: content.get(name) for name in ("everywhere", "sources")}
            return cls(content["device"], content["jax"], calls, **optional)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"these are no choices of kernels: {error!r}") from error

    def save(self, path: str | os.PathLike) -> None:
        """Writes the choices to a file, atomically, as JSON."""
        path = pathlib.Path(path)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(self.to_json())
        unfinished.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Choices":
        """Reads what `save` wrote.

        Raises:
            ValueError: the file is damaged.
            OSError: it cannot be read.
        """
        return cls.from_json(pathlib.Path(path).read_text())

    def remember(self) -> pathlib.Path:
        """Adds the choices to the user's cache folder, which `None` reads; returns the file."""
        path = cache_folder() / file_name(self.device, self.jax, self.sources)
        path.parent.mkdir(parents=True, exist_ok=True)
        before = _read(path) or Choices()
        merged = {key: before.calls.get(key, {}) | new for key, new in self.calls.items()}
        dataclasses.replace(self, calls=before.calls | merged).save(path)
        return path


def _parse_measured(choice: dict, default: str, microseconds: dict, left_out: dict) -> Measured:
    tile = tuple((part, tuple(size)) for part, size in choice["tile"])
    return Measured(Choice(choice["implementation"], tile), default, microseconds, left_out)


def choose(op: str, arguments: dict[str, Any], default: str) -> Choice:
    """The measured choice for a call, where one is in force and serves it, else its default."""
    key = call_key(op, arguments)
    for choices in _in_force():
        if (choice := choices.of(key)) is None:
            continue
        if (reason := dispatch.refusal_here(op, choice.implementation, arguments)) is None:
            return choice
        _say_once(f"{choice.name} does not serve a call of {op}: {reason}; using the default")
    return Choice(default)


def _in_force() -> list[Choices]:
    """The choices for calls that are traced now, best first.

    They are those whose context was entered; without any, for a GPU, those of the cache folder and
    those that ship with the package. The cache folder is read by single processes only: several
    could find different choices, and would then run programs that do not fit together.
    """
    if _IN_FORCE.value is not None or not device.is_gpu():
        return [_IN_FORCE.value or Choices()]
    name, folders = file_name(device.kind(), jax.__version__, hash_sources()), [SHIPPED]
    if jax.process_count() == 1:
        with contextlib.suppress(RuntimeError):  # a user without a home folder
            folders.insert(0, cache_folder())
    return [choices for folder in folders if (choices := _read(folder / name)) is not None]


def _read(path: pathlib.Path) -> Choices | None:
    """The choices in a file; None without one, or (reported once) if it is damaged."""
    try:
        return Choices.load(path) if path.exists() else None
    except (ValueError, OSError) as error:
        return _say_once(f"the choices in {path} are ignored: {error}")


@functools.cache
def _say_once(message: str) -> None:
    """Prints a message to standard error, once in a process."""
    device.say(message)
