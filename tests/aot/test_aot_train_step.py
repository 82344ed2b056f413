"""Training steps compiled for many H200s: attention's intermediates and the communication."""

import functools
import math
import re

import pytest

from benchmarks import memory
from benchmarks._gpus import absent_gpus
from rope_jax_kernels import Choices
from tests.aot.program import TARGETS, collectives

BATCH = 104  # on each device; no other dimension of these models
# Model -> heads, their channels, tokens in a row of scores, tokens with angles of their own, the
# scheme, and options that leave one stage.
CASES = {
    "vit_s16": (12, 32, 196, 196, "rope_mixed", "depth=1"),
    "swin_t": (3, 32, 49, 49, "rpb+rope_mixed", "depths=(2,),heads=(3,)"),
    "nat_mini": (2, 32, 49, 56**2, "rpb+rope_mixed", "depths=(1,),heads=(2,)"),
}


def find_copies(text, heads, head_dim):
    """Operations that copy q, k, v, or their windows or halos."""
    kinds = "slice|dynamic-slice|pad|concatenate|gather|transpose|copy|reverse"
    matches = re.findall(rf"= \w+\[([\d,]+)\]\S* ({kinds})\(", text)
    dimensions = [(list(map(int, shape.split(","))), kind) for shape, kind in matches]
    return [
        (shape, kind)
        for shape, kind in dimensions
        if shape[0] == BATCH and shape[-1] == head_dim and heads in shape
    ]


def find_scores(text, tokens):
    """Arrays with one number for each query and key of each example."""
    return re.findall(rf"\w+\[{BATCH}(?:,\d+)*,{tokens},{tokens}\]", text)


def find_angles(text):
    """Shapes of cosines and sines outside of the kernels (the learning rate's is one number)."""
    matches = re.findall(r"= \w+\[([\d,]+)\]\S* (?:cosine|sine)\(", text)
    return [tuple(map(int, shape.split(","))) for shape in matches]


@pytest.fixture(scope="module")
def steps():
    """(model, fsdp, implementation) -> its step for 8 GPUs, compiled once."""

    @functools.cache
    def step(name, fsdp=1, implementation=None):
        *_, position, options = CASES[name]
        settings = memory.classifier(name, position=position, options=options)
        with Choices(everywhere=implementation):
            return memory.compile_step(settings, absent_gpus(1, 8), BATCH, fsdp=fsdp)

    return step


@pytest.mark.parametrize("name", CASES)
def test_attention_writes_no_scores_angles_or_copies(name, steps):
    heads, head_dim, tokens, turned, *_ = CASES[name]
    text = steps(name).text
    assert any(target in text for target in TARGETS.values())
    assert find_scores(text, tokens) == []
    # The kernels of attention read a table [heads, tokens, pairs] of cosines and one of sines, of
    # all examples; before cuDNN's, the pass that unpacks computes them in registers.
    assert bool(find_angles(text)) == ("cudnn$fmha" not in text) == (name != "vit_s16")
    for shape in find_angles(text):
        assert BATCH not in shape
        assert math.prod(shape) <= heads * turned * head_dim // 2
    assert find_copies(text, heads, head_dim) == []


@pytest.mark.parametrize("name", CASES)
def test_devices_exchange_only_sums_of_gradients(name, steps):
    """Each parameter once, nearly all in float32, bias tables and frequencies included."""
    step = steps(name)
    exchanged = collectives(step.text)
    assert {kind for kind, _ in exchanged} == {"all-reduce"}
    parameters = step.state / 16  # float32, with Adam's two moments and the average
    assert 0.5 * 4 * parameters <= sum(size for _, size in exchanged) <= 1.1 * 4 * parameters


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_xla_writes_them_and_needs_more_memory(name, steps):
    """Verifies that the tests above detect such arrays, and that these cost memory."""
    heads, head_dim, tokens, *_ = CASES[name]
    plain = steps(name, implementation="xla")
    assert "__gpu$xla.gpu.triton" not in plain.text
    assert find_copies(plain.text, heads, head_dim)
    assert name == "nat_mini" or find_scores(plain.text, tokens)
    assert steps(name).other < 0.9 * plain.other


def test_divided_parameters_are_gathered_and_gradients_scattered(steps):
    step, undivided = steps("vit_s16", fsdp=8), steps("vit_s16")
    assert step.state < undivided.state / 7
    exchanged = collectives(step.text)
    assert {kind for kind, _ in exchanged} == {"all-gather", "reduce-scatter", "all-reduce"}
    gathered = sum(size for kind, size in exchanged if kind == "all-gather")
    assert gathered <= undivided.state / 16 * 4 / 2 * 1.1  # in bfloat16
    assert find_scores(step.text, 196) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hosts", "fsdp", "state", "other"),
    [
        ("deit3_l16", 1, 1, 4.6, 28),
        ("deit3_l16", 32, 8, 0.6, 28),
        ("swin_b", 1, 1, 1.4, 14),
        ("swin_b", 32, 8, 0.2, 14),
    ],
)
def test_large_models_fit(name, hosts, fsdp, state, other):
    """GiB on each of 8 GPUs, and of 256 with divided parameters, at 64 images per GPU.

    Only parameters and their gradients are communicated.
    """
    settings = memory.classifier(name, options="scan_layers=True")
    step = memory.compile_step(settings, absent_gpus(hosts, 8), 64, fsdp=fsdp)
    assert step.state < state * 2**30
    assert step.other < other * 2**30
    exchanged = collectives(step.text)
    assert {kind for kind, _ in exchanged} <= {"all-gather", "reduce-scatter", "all-reduce"}
    parameters = step.state * (fsdp if fsdp > 1 else 1) / 4
    assert max(size for _, size in exchanged) <= 1.1 * parameters
