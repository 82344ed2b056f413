"""Mistakes that are planted in the kernels are noticed.

A mistake is noticed if the emulator reports it, or if a result is off by more than rounding.
"""

import dataclasses
import functools
import sys

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as plt

from benchmarks._gpus import H200
from rope_jax_kernels import Global, Window
from rope_jax_kernels.attention import mosaic_window, plans, triton
from tests.aot.test_aot_emulated import (
    Attention,
    few_programs,
    is_exact,
    operands,
    rotate_all,
)
from tests.kernels.rotary_cases import Case
from tests.ptx import machine
from tests.ptx.capture import Emulator


def rotary(**options):
    case = Case(head_dim=64, dtype="bfloat16", **options)
    return functools.partial(rotate_all, case), operands(case, rotate_all)


def attending(*args, **options):
    case = Attention(*args, **options)
    return case, case.arrays()


WINDOWS = Window((7, 7), (3, 3)), (8, 7)
# Name -> implementation, function of the implementation, its arguments.
CALLS = {
    "rotary": ("triton", *rotary(tokens=11, pairs=12, pairing="interleaved")),
    "global": ("triton", *attending(Global(), (65,), batch=1, head_dim=64, pairs=12)),
    "windows": ("triton", *attending(Window((7, 7), (3, 3)), (14, 10), bias=True, batch=1)),
    "rotary, mosaic": ("mosaic", *rotary(batch=19, tokens=53, pairs=16)),
    "global, mosaic": (
        "mosaic",
        *attending(Global(), (130,), batch=3, head_dim=64, pairs=16),
    ),
    "windows, mosaic": ("mosaic", *attending(*WINDOWS, bias=True, batch=4)),
    "large windows, mosaic": (
        "mosaic",
        *attending(Window((10, 10), (5, 5)), (10, 11), bias=True, batch=3),
    ),
}


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
    implementation, f, arrays = CALLS[name]
    sites = Sites(getattr(module, function), number, unmask if module is plt else skip)
    monkeypatch.setattr(module, function, sites)
    emulator = Emulator(gpu_of(H200))
    if implementation == "mosaic":
        few_programs(monkeypatch)
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
