"""Everything that needs a GPU, in one command: tests, measured choices of kernels, the suite.

    python -m benchmarks gpu --out=benchmarks/results --limit-s=560

One after the other, in processes of their own: the tests in tests/gpu, `rope_jax.tune` for MODELS,
and `benchmarks suite`, in which calls without a named implementation use these choices. A call ends
at --limit-s at the latest, and the same command continues with what is missing: repeat it until it
prints "complete". In the folder --out,

    tests_gpu_SOURCES.jsonl   has a line with the outcome of each test, as they end
    measured/                 has the choices, for kernels/rope_jax_kernels/measured
    PART_gpu.json             are the results of the suite's parts, which `make tables` reads
    gpu_gpu.json, *.log       say how far each step has come, and what it has printed
    cache/                    can be deleted once everything is complete

A test that ends its process twice, or hangs, is left out and counted as failed. --rehearse runs the
same on a machine without a GPU, with small sizes: the names of its files end in _cpu.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import sys
import time
from collections import Counter
from typing import Any, Literal

import jax

from benchmarks._runner import Keep, earlier, record, write
from benchmarks.suite import GRACE_S, PARTS, finished, run_process
from rope_jax_kernels.cache import sources_of_kernels

# Those that show most come first.
TESTS = ("rotary", "unpack", "attention", "training", "limits", "sanitizer")
WORKERS = 4  # processes that test side by side; one of them runs all tests with the largest arrays
# (model, position, images on one GPU, training), as the suite measures them.
MODELS = (
    ("deit3_s16", "axial_rope", 256, False),
    ("swin_t", "axial_rope", 256, False),
    ("nat_mini", "axial_rope", 256, False),
    ("deit3_s16", "rope_mixed", 256, True),
    ("swin_t", "axial_rope", 128, True),
    ("nat_mini", "axial_rope", 128, True),
    ("deit3_b16", "axial_rope", 256, False),
    ("swin_t", "rpb", 256, False),
    ("nat_mini", "rpb", 256, False),
)
TUNE_S = 45.0  # for one model
KINDS = ("tests", "tune", "suite")
ALL_KINDS = list(KINDS)
NEEDED = ("pytest", "xdist", "beartype", "hypothesis", "jaxtyping", "flax", "optax")
NEEDED += ("ml_collections",)


@dataclasses.dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: of the step, unique.
        command: what it runs.
        least_s: seconds without which it is not started.
    """

    name: str
    command: list[str]
    least_s: float


def outcomes_file(out: pathlib.Path, platform: str) -> pathlib.Path:
    """The file with the tests' outcomes, for these sources of the kernels."""
    return out / f"tests_{platform}_{sources_of_kernels()}.jsonl"


def steps(out: pathlib.Path, platform: str, rehearse: bool) -> list[Step]:
    """All steps but the suite, whose command depends on the time that is left."""
    files = [f"tests/gpu/test_gpu_{name}.py" for name in TESTS]
    command = [sys.executable, "-m", "pytest", *files, "-q", "-p", "no:cacheprovider"]
    # Also in a rehearsal: a test that ends its process would otherwise end pytest with status 1.
    command += ["-n", "1" if rehearse else str(WORKERS), "--dist", "loadgroup"]
    found = [Step("tests", [*command, f"--outcomes={outcomes_file(out, platform)}"], 30.0)]
    for model, position, batch, training in MODELS[: 1 if rehearse else None]:
        options = [f"--model={model}", f"--position={position}", f"--batch={batch}"]
        options += [f"--seconds={TUNE_S}", *(["--train"] if training else [])]
        name = f"tune_{model}_{position}" + ("_train" if training else "")
        command = [sys.executable, "-m", "rope_jax.tune", *options]
        found.append(Step(name, command, TUNE_S + 30))
    return found


def environment(out: pathlib.Path, rehearse: bool) -> dict[str, str]:
    """Variables of all processes: their caches, and small sizes in a rehearsal."""
    cache = out.resolve() / "cache"
    found = {
        "ROPE_JAX_CACHE": str(cache),
        "ROPE_JAX_TEST_CACHE": str(cache / "tests"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path])),
    }
    return found | ({"ROPE_JAX_REHEARSE_GPU_TESTS": "1"} if rehearse else {})


def ended(name: str, status: str) -> bool:
    """Whether a step has ended by itself: tests that fail or have all been run are results too."""
    of_tests = ("failed (status 1)", "failed (status 5)") if name == "tests" else ()
    return status == "ok" or status in of_tests


def read_outcomes(path: pathlib.Path) -> list[dict[str, Any]]:
    """The outcomes in a file of tests; a line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def outcomes(path: pathlib.Path) -> str:
    """Counts of the tests' outcomes, and the names of those that failed."""
    entries = read_outcomes(path)
    found = {entry["test"]: entry for entry in entries if entry["outcome"] != "started"}
    counts = Counter(entry["outcome"] for entry in found.values())
    text = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    failed = [name for name, entry in found.items() if entry["outcome"] == "failed"]
    return "\n".join([f"tests: {text or 'none'}", *(f"  failed: {name}" for name in failed)])


def copy_choices(out: pathlib.Path) -> None:
    """Copies measured choices out of the cache."""
    (out / "measured").mkdir(exist_ok=True)
    for path in (out / "cache" / "kernels").glob("*.json"):
        shutil.copy(path, out / "measured" / path.name)


def suite_step(out: pathlib.Path, left_s: float, rehearse: bool) -> Step:
    """The suite, in the time that is left; parts of it that are complete are not repeated."""
    options = [f"--out={out}", f"--minutes={max(0.0, left_s - 10) / 60:.2f}"]
    options += ["--only", "attention"] if rehearse else []
    return Step("suite", [sys.executable, "-m", "benchmarks", "suite", *options], 60.0)


def suite_left(out: pathlib.Path, platform: str, rehearse: bool) -> list[str]:
    """The parts of the suite that are not complete."""
    parts = ["attention"] if rehearse else PARTS
    return [name for name in parts if not finished(name, platform, out)]


def attempt(step: Step, out: pathlib.Path, platform: str, left_s: float) -> str:
    """Runs a step for at most `left_s` seconds; returns "complete", or what became of it."""
    if left_s < step.least_s:
        return "no time was left"
    print(f"{step.name}: at most {left_s:.0f} s", flush=True)
    log = out / f"{step.name}_{platform}.log"
    status = run_process(step.command, left_s, log)
    copy_choices(out)
    return "complete" if ended(step.name, status) else f"{status}: see {log}"


def check(out: pathlib.Path | None, platform: str, rehearse: bool) -> None:
    """Raises SystemExit if nothing can be measured here."""
    if out is None:
        raise SystemExit("--out must name a folder for results and logs")
    if rehearse == (platform == "gpu"):
        raise SystemExit(f"jax runs on {platform}: --rehearse is for machines without a GPU alone")
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"not installed: {', '.join(missing)}; pip install -e '.[test]'")


def run(
    keep: Keep,
    *,
    out: pathlib.Path | None,
    limit_s: float = 560.0,
    rehearse: bool = False,
    only: list[Literal[*KINDS]] = ALL_KINDS,
) -> None:
    """Runs the steps that are not complete, until the time is over.

    Args:
        keep: unused, because `out` is a folder.
        out: folder for results and logs.
        limit_s: end after this many seconds
        rehearse: small sizes, on a machine without a GPU
        only: kinds of steps to run
    """
    end = time.monotonic() + limit_s - GRACE_S - 3  # to stop the last process, and to write
    platform = jax.default_backend()
    check(out, platform, rehearse)
    out.mkdir(parents=True, exist_ok=True)
    os.environ.update(environment(out, rehearse))
    state, settings = out / f"gpu_{platform}.json", {"rehearse": rehearse}
    done = earlier(state, "gpu", settings).get("done", {})
    for step in [
        *steps(out, platform, rehearse),
        suite_step(out, end - time.monotonic(), rehearse),
    ]:
        if step.name.partition("_")[0] not in only or done.get(step.name) == "complete":
            continue
        if step.name == "suite":
            step = suite_step(out, end - time.monotonic(), rehearse)
        done[step.name] = attempt(step, out, platform, end - time.monotonic())
        if step.name == "suite" and (parts := suite_left(out, platform, rehearse)):
            done["suite"] = f"not complete: {', '.join(parts)}"
        write(record("gpu", settings, done=done), state)
    print(outcomes(outcomes_file(out, platform)))
    left = {name: status for name, status in done.items() if status != "complete"}
    print("\n".join(f"{name}: {status}" for name, status in left.items()))
    print("repeat the command to continue" if left else "complete")
