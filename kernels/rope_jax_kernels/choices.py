"""Measured choices of implementations and tiles, and their use by calls that name none.

`record` notes calls, `tune` measures them, and the `Choices` that it returns are used by every call
with `implementation=None` that is traced inside `with choices:`. Elsewhere such a call on a GPU
uses the choices that `Choices.remember` wrote to the user's cache folder, or those that ship with
this package in `measured/`, for this kind of device, version of jax and sources of the kernels.

Both contexts take part in the caches of `jax.jit`: a function is traced again in another context.
A trace cannot see whether it will be differentiated, so a call with measured choices has a
derivative rule of its own, which uses the choice for the gradients that are wanted.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from rope_jax_kernels import device
from rope_jax_kernels.cache import cache_folder, file_name, locked, sources_of_kernels
from rope_jax_kernels.calls import FORWARD, RECORDER, Arrays, arrays_of, direction, key_of

SHIPPED = pathlib.Path(__file__).parent / "measured"

# Part of a kernel -> its sizes, as a hashable tuple; () for the kernel's own plan.
Tile = tuple[tuple[str, tuple[int, ...]], ...]

_IN_FORCE = jax.make_user_context(None)
_TILE = jax.make_user_context(())


def tile_in_force() -> Tile:
    """The tile of the kernel that is being traced; () for its own plan.

    Kernels read it once, where they are called, and keep it in their static arguments, because
    their backward pass is traced elsewhere.
    """
    return _TILE.value


def with_tile(tile: Tile) -> Any:
    """A context in which `tile_in_force` returns this tile."""
    return _TILE(tile)


@dataclasses.dataclass(frozen=True)
class Choice:
    """An implementation, and the sizes of its tiles."""

    implementation: str
    tile: Tile = ()

    @property
    def name(self) -> str:
        """For tables: "triton", or "triton forward=64x32x4x2x1" with other tiles than planned."""
        sizes = [f"{part}={'x'.join(map(str, size))}" for part, size in self.tile]
        return " ".join([self.implementation, *sizes])


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of one call in one direction.

    Attributes:
        choice: the fastest candidate that is right.
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
        calls: call (`Call.key`) -> direction -> what was measured.
        everywhere: an implementation for every call that it serves, or None.
        sources: of the kernels that were measured, see `sources_of_kernels`.
    """

    device: str = ""
    jax: str = jax.__version__
    calls: dict[str, dict[str, Measured]] = dataclasses.field(default_factory=dict)
    everywhere: str | None = None
    sources: str = dataclasses.field(default_factory=sources_of_kernels)

    def __post_init__(self):
        self._entered = []
        self._said = set()

    def __enter__(self) -> "Choices":
        context = _IN_FORCE(self)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def misfit(self) -> str | None:
        """Why the choices say nothing about the target's calls; None if they do."""
        if self.device not in ("", device.kind()):
            return f"measured on another kind of device, {self.device}"
        if self.calls and self.sources != sources_of_kernels():
            return "measured with other sources of the kernels"
        return None

    def of(self, key: str) -> dict[str, Choice]:
        """Direction -> choice, for a call on the target device."""
        if self.everywhere is not None:
            return {FORWARD: Choice(self.everywhere)}
        if key not in self.calls:
            return {}
        if reason := self.misfit():
            self._say_once(f"choices are not used: they were {reason}")
            return {}
        return {name: measured.choice for name, measured in self.calls[key].items()}

    def refused(self, choice: Choice, op: str, reason: str) -> None:
        """Says once that a chosen implementation does not serve a call."""
        self._say_once(f"{choice.name} does not serve a call of {op}: {reason}; using the default")

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            device.say(message)

    def updated(self, other: "Choices") -> "Choices":
        """These choices and newer ones for the same device, which take precedence."""
        calls = {key: dict(found) for key, found in self.calls.items()}
        for key, found in other.calls.items():
            calls.setdefault(key, {}).update(found)
        found = Choices(other.device, other.jax, calls, sources=other.sources)
        found._said = self._said
        return found

    def to_json(self) -> str:
        """The choices as text; `from_json` reads it."""
        calls = {
            key: {name: dataclasses.asdict(measured) for name, measured in found.items()}
            for key, found in self.calls.items()
        }
        content = {
            "format": 1,
            "device": self.device,
            "jax": self.jax,
            "sources": self.sources,
            "calls": calls,
        }
        return json.dumps(content, indent=1) + "\n"

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
                key: {name: _measured(**fields) for name, fields in found.items()}
                for key, found in content["calls"].items()
            }
            sources = str(content.get("sources", ""))
            return cls(str(content["device"]), str(content["jax"]), calls, sources=sources)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"these are no choices of kernels: {error!r}") from error

    def save(self, path: str | os.PathLike) -> None:
        """Writes the choices to a file, atomically, as JSON."""
        path = pathlib.Path(path)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            try:
                file.write(self.to_json())
                file.flush()  # where a full disk shows
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Choices":
        """Reads what `save` wrote.

        Raises:
            ValueError: the file is damaged; the message names it.
            OSError: it cannot be read.
        """
        try:
            return cls.from_json(pathlib.Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def remember(self) -> pathlib.Path:
        """Adds the choices to the user's cache folder, which `None` reads; returns the file."""
        path = cache_folder() / file_name(self.device, self.jax, self.sources)
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent):
            before = _read(path)
            (self if before is None else before.updated(self)).save(path)
        return path


def _measured(choice: dict, default: str, microseconds: dict, left_out: dict) -> Measured:
    tile = tuple((str(part), tuple(int(n) for n in size)) for part, size in choice["tile"])
    times = {name: float(time) for name, time in microseconds.items()}
    return Measured(Choice(str(choice["implementation"]), tile), str(default), times, left_out)


def remembered() -> Choices | None:
    """The choices for the target device that ship with the package or are in the cache folder.

    The cache folder is read by single processes only: several could find different choices, and
    would then run programs that do not fit together.
    """
    if not device.is_gpu():
        return None
    name = file_name(device.kind(), jax.__version__, sources_of_kernels())
    folders = [SHIPPED]
    if jax.process_count() == 1:
        with contextlib.suppress(RuntimeError):
            folders.append(cache_folder())
    found = None
    for folder in folders:
        if (choices := _read(folder / name)) is not None:
            found = choices if found is None else found.updated(choices)
    return found


def _read(path: pathlib.Path) -> Choices | None:
    """The choices in a file; None without one, or (said once) if it is damaged."""
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return None
    return _read_once(path, changed)


@functools.lru_cache(maxsize=8)
def _read_once(path: pathlib.Path, changed: int) -> Choices | None:
    del changed
    try:
        return Choices.load(path)
    except (ValueError, OSError) as error:
        device.say(f"measured choices are ignored: {error}")
        return None


def call(
    op: str,
    arguments: dict[str, Any],
    default: str,
    *,
    run: Callable[[str, str, dict[str, Any]], Any],
    refusal: Callable[[str, str, dict[str, Any]], str | None],
) -> Any:
    """Computes a call without a name by the measured choice for it, else by its default.

    Args:
        op: name of the operation.
        arguments: its arguments by name.
        default: the implementation without a measurement.
        run: (op, implementation, arguments) -> result.
        refusal: (op, implementation, arguments) -> reason or None.
    """
    if RECORDER.value is not None and not device.may_be_partitioned():
        arguments = RECORDER.value.note(op, arguments, default)
        with RECORDER(None):  # not the calls inside an implementation
            return run(op, default, arguments)
    choices = _IN_FORCE.value if _IN_FORCE.value is not None else remembered()
    found = {} if choices is None else choices.of(key_of(op, arguments))
    served = {}
    for name, choice in found.items():
        reason = refusal(op, choice.implementation, arguments)
        if reason is None:
            served[name] = choice
        else:
            choices.refused(choice, op, reason)

    def compute(choice: Choice, arguments: dict[str, Any]) -> Any:
        with with_tile(choice.tile):
            return run(op, choice.implementation, arguments)

    if not served:
        return run(op, default, arguments)
    if set(served) == {FORWARD} and choices.everywhere is not None:
        return compute(served[FORWARD], arguments)
    gradients = [choice for name, choice in served.items() if name != FORWARD]
    trained = gradients[0] if gradients else Choice(default)
    forward = served.get(FORWARD, trained)
    if {forward, trained, *gradients} == {forward}:
        return compute(forward, arguments)
    return _by_direction(arrays_of(arguments), compute, forward, trained, served)


@dataclasses.dataclass(frozen=True)
@jax.tree_util.register_static
class _Wanted:
    """Positions of the arrays whose gradient is wanted, among how many."""

    at: tuple[int, ...]
    count: int


def _by_direction(
    arrays: Arrays, compute: Callable, forward: Choice, trained: Choice, found: dict[str, Choice]
) -> Any:
    """A call whose value alone is computed by `forward`, and with gradients by their choice.

    Args:
        arrays: of the call.
        compute: (choice, arguments) -> result.
        forward: choice for the value alone.
        trained: choice for gradients that are not in `found`.
        found: direction -> choice.
    """

    @jax.custom_vjp
    def apply(*values: Array) -> Any:
        return compute(forward, arrays.put(values))

    def value_and_pull(*primals: Any) -> tuple[Any, tuple]:
        values = [x.value for x in primals]
        at = tuple(i for i, x in enumerate(primals) if x.perturbed)
        choice = found.get(direction([arrays.names[i] for i in at]), trained)

        def of_wanted(*some: Array) -> Any:
            own = dict(zip(at, some, strict=True))
            return compute(choice, arrays.put([own.get(i, x) for i, x in enumerate(values)]))

        out, pull = jax.vjp(of_wanted, *[values[i] for i in at])
        return out, (pull, _Wanted(at, len(values)))

    def pull_back(residuals: tuple, gradient: Any) -> tuple:
        pull, wanted = residuals
        (gradient,) = device.vary_alike(device.without_symbolic_zeros(gradient))
        own = dict(zip(wanted.at, pull(gradient), strict=True))
        return tuple(own.get(i) for i in range(wanted.count))

    apply.defvjp(value_and_pull, pull_back, symbolic_zeros=True)
    return apply(*arrays.values)
