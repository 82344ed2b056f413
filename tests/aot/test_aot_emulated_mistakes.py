"""Mistakes that are planted in the kernels, in their PTX and in their source, are noticed.

A mistake is noticed if the emulator reports it, or if a result is off by more than rounding.
"""

import contextlib
import dataclasses
import functools
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as plt

from benchmarks._gpus import A100, H200
from rope_jax_kernels import Global, Neighborhood, Window
from rope_jax_kernels.attention import mosaic_window, plans, triton
from tests.aot.test_aot_emulated import Attention, few_programs, is_exact, operands, rotate_all
from tests.kernels.rotary_cases import Case
from tests.ptx import machine
from tests.ptx.capture import Emulator
from tests.ptx.launch import Partial, emulate
from tests.ptx.order import Findings

PLACES = 4  # at most, of a kind of mistake in a kernel


def rotary(**options):
    case = Case(head_dim=64, dtype="bfloat16", **options)
    return functools.partial(rotate_all, case), operands(case, rotate_all)


def attending(*args, **options):
    case = Attention(*args, **options)
    return case, case.arrays()


def attending_to_nan(*args, **options):
    """The call of `attending`, with NaN in its first example."""
    case, ((qkv,), *others) = attending(*args, **options)
    qkv = qkv.copy()
    qkv[0, 0, 0] = np.nan
    return case, ((qkv,), *others)


WINDOWS = Window((7, 7), (3, 3)), (8, 7)
# Name -> kind of GPU, implementation, function of the implementation, its arguments.
CALLS = {
    "rotary": (H200, "triton", *rotary(tokens=11, pairs=12, pairing="interleaved")),
    "global": (H200, "triton", *attending(Global(), (65,), batch=1, head_dim=64, pairs=12)),
    "windows": (H200, "triton", *attending(Window((7, 7), (3, 3)), (14, 10), bias=True, batch=1)),
    "neighborhoods": (H200, "triton", *attending(Neighborhood((7, 7)), (9, 13), bias=True)),
    "A100": (A100, "triton", *attending(Window((7, 7), (3, 3)), (7, 9), batch=1, head_dim=64)),
    "float32": (H200, "triton", *attending(Global(), (50,), batch=1, dtype="float32")),
    "rotary, mosaic": (H200, "mosaic", *rotary(batch=19, tokens=53, pairs=16)),
    "global, mosaic": (
        H200,
        "mosaic",
        *attending(Global(), (130,), batch=3, head_dim=64, pairs=16),
    ),
    "windows, mosaic": (
        H200,
        "mosaic",
        *attending(*WINDOWS, bias=True, batch=4),
    ),
    "windows with NaN, mosaic": (
        H200,
        "mosaic",
        *attending_to_nan(*WINDOWS, bias=True, batch=4),
    ),
    "large windows, mosaic": (
        H200,
        "mosaic",
        *attending(Window((10, 10), (5, 5)), (10, 11), bias=True, batch=3),
    ),
}


# What is changed, in the text of a kernel -> what takes its place, with the groups of the match.
REMOVED = lambda match: ""
MISTAKES = {
    "bar.sync removed": (r"^\s*bar\.sync[^\n]*$", REMOVED),
    "bar.warp.sync removed": (r"^\s*bar\.warp\.sync[^\n]*$", REMOVED),
    "fence.proxy.async removed": (r"^\s*fence\.proxy\.async[^\n]*$", REMOVED),
    "wgmma.wait_group removed": (r"^\s*wgmma\.wait_group[^\n]*$", REMOVED),
    "wgmma.fence removed": (r"^\s*wgmma\.fence[^\n]*$", REMOVED),
    "cp.async.wait_group removed": (r"^\s*cp\.async\.(?:bulk\.)?wait_group[^\n]*$", REMOVED),
    "wait for an mbarrier removed": (r"\{\s*\.reg \.pred\s+P1;.*?\}", REMOVED),
    "arrival at an mbarrier removed": (r"^[^\n]*mbarrier\.arrive[^\n]*$", REMOVED),
    "mask of a read removed": (r"@!?%p\d+ (?=ld\.global)", REMOVED),
    "mask of a write removed": (r"@!?%p\d+ (?=st\.global)", REMOVED),
    "bound one higher": (
        r"(setp\.[lg][te]\.[su]32\s+%p\d+, %r\d+, )(\d+);",
        lambda match: f"{match[1]}{int(match[2]) + 1};",
    ),
    "other lane": (
        r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+, )(\d+)",
        lambda match: f"{match[1]}1",
    ),
    "not transposed": (
        r"((?:ld|st)matrix\.sync\.aligned\.m8n8\.x\d)\.trans",
        lambda match: match[1],
    ),
    "offset in shared memory": (
        r"((?:(?:ld|st)\.shared|ldmatrix|stmatrix)\S*\s.*\[%rd?\d+\+)(\d+)\]",
        lambda match: f"{match[1]}{int(match[2]) + 16}]",
    ),
    "factor of an address halved": (
        r"(mul\.wide\.[su]32\s+%rd\d+, %r\d+, )(\d+);",
        lambda match: f"{match[1]}{int(match[2]) // 2};",
    ),
    "stride one higher": (
        r"(mad\.lo\.s32\s+%r\d+, %r\d+, )(\d+),",
        lambda match: f"{match[1]}{int(match[2]) + 1},",
    ),
    "other addend": (
        r"(fma\.rn\.f32\s+%r\d+, %r\d+, )(%r\d+), %r\d+;",
        lambda match: f"{match[1]}{match[2]}, {match[2]};",
    ),
    "branch removed": (r"^\s*@!?%p\d+ bra[^\n]*$", REMOVED),
}


# Those of which one place is enough. The others may be needless at some, as a fence without a store
# since the last one; so may all in the kernels for Mosaic GPU, which has neighbouring barriers.
EACH = (
    "bar.sync removed",
    "bar.warp.sync removed",
    "not transposed",
    "offset in shared memory",
    "factor of an address halved",
    "stride one higher",
)
# (call, mistake) -> how many of these places change nothing: where data stay in a warp, which
# bar.warp.sync orders, and where channels and keys are read that only pad a tile.
NEEDLESS = {
    ("windows", "bar.sync removed"): 2,
    ("windows", "offset in shared memory"): 1,
    ("float32", "bar.sync removed"): 1,
    ("float32", "offset in shared memory"): 2,
}


def plant(ptx, mistake, *, each):
    """Texts with a mistake, at one of several places each or at all of them."""
    pattern, change = MISTAKES[mistake]
    pattern = re.compile(pattern, re.M | re.S if "P1" in pattern else re.M)
    matches = list(pattern.finditer(ptx))
    if not each:
        return [pattern.sub(change, ptx)] if matches else []
    some = matches[:: max(1, len(matches) // PLACES)][:PLACES]
    return [ptx[: x.start()] + change(x) + ptx[x.end() :] for x in some]


def values(results):
    return [x.value if isinstance(x, Partial) else x for x in results]


def differ(results, correct):
    """True if results are off by more than rounding."""
    for x, y in zip(values(results), values(correct), strict=True):
        epsilon, x, y = float(jnp.finfo(y.dtype).eps), x.astype(np.float64), y.astype(np.float64)
        finite = np.isfinite(y)  # infinite is lse of queries without a token
        largest = np.abs(y[finite]).max(initial=0)
        if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
            return True
        if not np.abs(x[finite] - y[finite]).max(initial=0) <= 4 * epsilon * largest:
            return True
    return False


@functools.cache
def record(name, gpu_of):
    """The launches of a call, their inputs and their results."""
    kind, implementation, f, arrays = CALLS[name]
    emulator = Emulator(gpu_of(kind))
    with few_programs() if implementation == "mosaic" else contextlib.nullcontext():
        emulator(functools.partial(f, implementation), *arrays)
    assert not emulator.findings
    return [(*x, emulate(*x, Findings())) for x in emulator.launches]


def first_change(old, new):
    lines = zip(old.split("\n"), new.split("\n"), strict=False)
    return next(f"line {i}: {x}" for i, (x, y) in enumerate(lines, start=1) if x != y)


def is_noticed(launch, inputs, correct, ptx):
    findings = Findings()
    results = emulate(dataclasses.replace(launch, ptx=ptx), inputs, findings)
    return bool(findings) or differ(results, correct)


ALONE = "large windows, mosaic", "windows with NaN, mosaic"  # not for mistakes in PTX by themselves
# Call -> the same with other numbers, for mistakes that matter to these alone.
OTHERS = {"windows, mosaic": ("windows with NaN, mosaic",)}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ALONE])
def test_mistakes_in_ptx_are_noticed(name, mistake, gpu_of, monkeypatch):
    monkeypatch.setattr(machine, "MOST_STEPS", 50_000)
    each = mistake in EACH and "mosaic" not in name
    recorded = [record(x, gpu_of) for x in (name, *OTHERS.get(name, ()))]
    missed = [
        f"{same[0][0].name}, {first_change(same[0][0].ptx, ptx)}"
        for same in zip(*recorded, strict=True)
        for ptx in plant(same[0][0].ptx, mistake, each=each)
        if not any(is_noticed(*x, ptx) for x in same)
    ]
    assert len(missed) <= NEEDLESS.get((name, mistake), 0), missed


class Sites:
    """Calls f differently where it is called by one line of the kernels.

    Args:
        f: a function that kernels call.
        number: of the line, in the order in which lines first call f.
        change: a function of f that makes the other call.
    """

    def __init__(self, f, number, change):
        self.f, self.number, self.changed, self.lines = f, number, change(f), []

    def __call__(self, *args, **kwargs):
        caller = sys._getframe(1)
        line = caller.f_code.co_filename, caller.f_lineno
        if line not in self.lines:
            self.lines.append(line)
        f = self.changed if self.lines.index(line) == self.number else self.f
        return f(*args, **kwargs)

    def __get__(self, instance, owner):
        return functools.partial(self, instance)


def skip(f):
    """Does nothing instead of f."""
    return lambda *args, **kwargs: None


def unmask(f):
    """f without its mask."""
    return lambda *args, mask=None, other=None, **kwargs: f(*args, **kwargs)


# Left out because they change nothing: the commit before the next queries are fetched, and the last
# wait of the backward kernel, which Mosaic GPU's own barriers and another wait make needless here;
# for windows, the masks of a row's numbers and of coordinates.
SOURCES = [
    (name, module, function, number)
    for name, module, function, numbers in (
        ("rotary, mosaic", plgpu, "commit_smem", range(2)),
        ("rotary, mosaic", plgpu, "barrier_wait", range(2)),
        ("rotary, mosaic", plgpu, "wait_smem_to_gmem", range(2)),
        ("global, mosaic", plgpu, "commit_smem", (1, 2, 3)),
        ("global, mosaic", plgpu, "barrier_wait", range(5)),
        ("global, mosaic", plgpu, "barrier_arrive", range(1)),
        ("global, mosaic", plgpu, "wait_smem_to_gmem", range(3)),
        ("windows, mosaic", mosaic_window.Program, "meet", range(8)),
        ("windows, mosaic", plgpu, "barrier_wait", range(2)),
        ("windows, mosaic", plgpu, "wait_smem_to_gmem", range(4)),
        ("large windows, mosaic", plgpu, "barrier_wait", range(3)),
        ("large windows, mosaic", plgpu, "barrier_arrive", range(1)),
        ("rotary", plt, "load", range(3)),
        ("rotary", plt, "store", range(2)),
        ("global", plt, "load", range(4)),
        ("global", plt, "store", range(4)),
        ("windows", plt, "load", range(2)),
        ("windows", plt, "store", range(3)),
    )
    for number in numbers
]


@pytest.mark.parametrize(("name", "module", "function", "number"), SOURCES)
def test_mistakes_in_kernels_are_noticed(name, module, function, number, gpu_of, monkeypatch):
    monkeypatch.setattr(machine, "MOST_STEPS", 50_000)
    kind, implementation, f, arrays = CALLS[name]
    sites = Sites(getattr(module, function), number, unmask if module is plt else skip)
    monkeypatch.setattr(module, function, sites)
    emulator = Emulator(gpu_of(kind))
    with few_programs() if implementation == "mosaic" else contextlib.nullcontext():
        results = emulator(functools.partial(f, implementation), *arrays)
    assert number < len(sites.lines)
    assert emulator.findings or not is_exact(results, functools.partial(f, "xla"), arrays)


def test_a_race_between_a_product_and_the_next_copy_is_found(gpu_of, monkeypatch):
    """That of `plan`'s docstring, where closed patterns had two stages."""

    def with_two_stages(*args):
        return dataclasses.replace(plans.plan(*args), stages=2)

    monkeypatch.setattr(triton, "plan", with_two_stages)
    case = Attention(Global(), (50,), head_dim=64, pairs=16, learned=False)
    emulator = Emulator(gpu_of(H200))
    emulator(functools.partial(case, "triton"), *case.arrays())
    assert "what a unit still reads in shared memory" in str(emulator.findings)
