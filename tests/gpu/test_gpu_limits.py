"""Memory full of NaN, batches beyond a grid's limit, arrays beyond 31 bits, and other streams."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax_kernels import Rotation, rotate
from rope_jax_kernels.accuracy import allowed_error, error
from tests.gpu import programs
from tests.gpu.programs import at

pytestmark = pytest.mark.gpu


def select_rehearsed(runs):
    """Selects the runs that a rehearsal interprets."""
    return [run for run in runs if at(True, run.implementation == "triton")]


def fill_with_nan(count):
    """Allocates and frees arrays of NaN, which later allocations find in memory."""
    some = [jnp.full(2**20 // (i + 1) * 2, jnp.nan) for i in range(count)]
    jax.block_until_ready(some)


@pytest.mark.parametrize("run", select_rehearsed(programs.RUNS), ids=str)
def test_unwritten_memory_is_not_read(run):
    """Previous contents of memory change no bit.

    Gradients by cuDNN are sums in an order that varies, so they are equal up to rounding.
    """
    compute, operands = jax.jit(run), run.operands()
    before = jax.tree.map(np.asarray, compute(*operands))
    for count in (1, 16, 64):
        fill_with_nan(at(count, 1))
        for name, x in compute(*operands).items():
            assert np.isfinite(np.float32(x)).all(), name
            if run.implementation == "cudnn" and name != "out":
                assert error(x, before[name]) <= allowed_error(0, run.dtype, gradient=True), name
            else:
                assert np.asarray(x).tobytes() == before[name].tobytes(), name


def check_last_examples(run):
    """Checks that examples at the end of the batch are computed as in a small batch."""
    few = dataclasses.replace(run, batch=4)
    qkv, *terms = run.operands()
    results = jax.jit(run)(qkv, *terms)
    results = {name: np.asarray(results[name][-4:]) for name in ("out", "qkv")}
    last = qkv[-4:]
    wide = jnp.asarray(last, jnp.float32)
    exact = dataclasses.replace(few, implementation="xla", dtype="float32")
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(exact)(wide, *terms)
    plain = jax.jit(dataclasses.replace(few, implementation="xla"))(last, *terms)
    for name, x in results.items():
        plain_error = error(plain[name], exact[name])
        allowed = allowed_error(plain_error, x.dtype, gradient=name != "out")
        assert error(x, exact[name]) <= allowed, name


@pytest.mark.parametrize("run", select_rehearsed(programs.MANY_EXAMPLES), ids=str)
def test_more_examples_than_a_grid_has_programs(run):
    check_last_examples(run)


@pytest.mark.xdist_group("largest")  # one process at a time has them
@pytest.mark.parametrize("run", select_rehearsed(programs.MANY_ELEMENTS), ids=str)
def test_more_elements_than_31_bits_can_index(run):
    shape = run.shapes()[0]
    assert shape.size > at(2**31, 0)
    memory = jax.devices()[0].memory_stats() or {"bytes_limit": at(0, 2**63)}
    if memory["bytes_limit"] < (needed := 6 * 2 * shape.size):
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of memory")
    check_last_examples(run)


@pytest.mark.parametrize("run", select_rehearsed(programs.OURS), ids=str)
def test_a_hundred_runs_next_to_other_work_are_equal(run):
    """Other streams change the timing of the parts of a kernel."""
    operands, compute = run.operands(), jax.jit(run)
    first = jax.tree.map(np.asarray, compute(*operands))
    with programs.other_work():
        for _ in range(at(100, 2)):
            for name, result in compute(*operands).items():
                assert np.asarray(result).tobytes() == first[name].tobytes(), name


def test_rotations_of_cpu_arrays_run_on_the_cpu():
    cpu = jax.devices("cpu")[0]
    q = jnp.ones((2, 6, 3, 64), jnp.bfloat16)
    arrays = jax.device_put((q, jnp.ones((6, 2)), jnp.ones((3, 2, 16))), cpu)
    turn = lambda q, coords, freqs: rotate(q, q, Rotation(coords, freqs))
    for run in (turn, jax.jit(turn)):
        for x in run(*arrays):
            assert x.devices() == {cpu}
