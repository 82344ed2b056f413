"""Checks every annotation of the two packages while tests run, and offers common fixtures."""

import gc
import importlib.util
import os
import pathlib
import shlex
import signal
import sys
import tempfile
import zlib

import hypothesis
import jax
import jaxtyping
import pytest

HERE = pathlib.Path(__file__).parent
# Image sets that may not be shipped.
IMAGES = pathlib.Path(os.environ.get("ROPE_JAX_TEST_IMAGES", "/nonexistent"))
_PACKAGES = ("rope_jax", "rope_jax_kernels")
if imported := sorted(name for name in sys.modules if name.split(".")[0] in _PACKAGES):
    raise RuntimeError(
        f"{imported} were imported before their annotations could be checked: remove the plugin "
        "that does so"
    )
# Shapes, dtypes and types of all arguments and results: a wrong annotation fails the test.
jaxtyping.install_import_hook(_PACKAGES, "beartype.beartype")
# Some tests send these signals, which are ignored under `nohup` or a script's `&`.
for number, handler in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


# The older of XLA's two code generators for CPUs takes half of the time of the newer one.
QUICK = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"


def compiles_quickly() -> bool:
    """True if programs compile fast and run slowly: most programs of the tests run once.

    False with jax's plugin for GPUs, as tests/aot and tests/gpu judge what users compile, and with
    ROPE_JAX_TEST_OPTIMIZED=1, which compiles any tests as users do.
    """
    optimized = os.environ.get("ROPE_JAX_TEST_OPTIMIZED") == "1"
    return not (optimized or importlib.util.find_spec("jax_plugins"))


def pytest_addoption(parser):
    parser.addoption("--sample", type=int, default=1, metavar="N", help="run one in N tests")
    parser.addoption("--sample-seed", default="", metavar="TEXT", help="what draws them")
    parser.addoption("--peers", action="store_true", help="tests/aot: compile other libraries, too")


def pytest_configure(config):
    """Keeps compiled programs between runs of the tests, in this process and those it starts.

    They are in $ROPE_JAX_TEST_CACHE, by default in pytest's own cache, which `--cache-clear`
    empties. Entries have a checksum: jax warns of one that another process has not written to its
    end, and compiles the program.
    """
    folder = os.environ.get("ROPE_JAX_TEST_CACHE")
    if folder is None and hasattr(config, "cache"):
        folder = config.cache.mkdir("xla")
    elif folder is None:  # -p no:cacheprovider
        temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        config.add_cleanup(temporary.cleanup)
        folder = temporary.name
    settings = {
        "jax_compilation_cache_dir": os.path.abspath(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    if compiles_quickly():
        flags = os.environ.get("XLA_FLAGS", "")
        if QUICK not in flags:  # as in the processes of pytest-xdist
            os.environ["XLA_FLAGS"] = f"{flags} {QUICK}".strip()
        settings["jax_disable_most_optimizations"] = True
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)  # for processes that tests start
        jax.config.update(name, value)
    jax.monitoring.register_event_duration_secs_listener(_count)
    message = "Error (reading|writing) persistent compilation cache entry"
    config.addinivalue_line("filterwarnings", f"ignore:{message}:UserWarning")


# Tests that this machine cannot run, and the commands that run them.
_left_out = set()


def pytest_ignore_collect(collection_path):
    """Does not read the folders of tests that this machine cannot run."""
    if command := _runs_elsewhere(collection_path):
        _left_out.add(command)
        return True
    return None


def _runs_elsewhere(path):
    """The command that runs the tests of a folder, or None if this machine can run them."""
    if path == HERE / "gpu":
        rehearsing = os.environ.get("ROPE_JAX_REHEARSE_GPU_TESTS") == "1"
        can_run = rehearsing or jax.default_backend() == "gpu"
        return None if can_run else "tests/gpu (`make test EXTRAS=test,cuda13`, with a GPU)"
    if path == HERE / "aot":
        without_driver = os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") == "1"
        can_run = without_driver and importlib.util.find_spec("jax_plugins")
        return None if can_run else "tests/aot (`make test-aot`, on any machine)"
    return None


@pytest.hookimpl(trylast=True)  # of those that `-m` and `-k` leave
def pytest_collection_modifyitems(config, items):
    """Deselects tests that this machine cannot run or `--sample` does not draw."""
    kept, images = [], 0
    for item in items:
        names = [mark.args[0] for mark in item.iter_markers("images")]
        # `pytest_ignore_collect` does not see a folder or a file named on the command line.
        if commands := [*filter(None, map(_runs_elsewhere, item.path.parents))]:
            _left_out.update(commands)
        elif all((IMAGES / name).exists() for name in names):
            kept.append(item)
        else:
            images += 1
    if images:
        _left_out.add(f"{images} that need images (ROPE_JAX_TEST_IMAGES, a folder of them)")
    if (one_in := config.getoption("sample")) > 1:
        kept = sample(kept, one_in, config.getoption("sample_seed"))
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept


def sample(items, one_in, seed):
    """Draws one test in `one_in`, evenly among the cases of each test, all equally likely."""

    def place(item):
        module, _, case = item.nodeid.partition("::")
        return module, case.partition("[")[0], zlib.crc32(f"{seed} {case}".encode())

    return sorted(items, key=place)[zlib.crc32(seed.encode()) % one_in :: one_in]


def pytest_collection_finish():
    """Starts the devices as commands do, and makes the collection of garbage rare.

    Garbage is collected less often, and not among what was imported: a tenth of the tests' time.
    Hypothesis draws once before: it looks for what holds its generator, which is not found among
    what is frozen (from Python 3.14 on, where every dictionary is the collector's as soon as it is
    made).
    """
    from rope_jax.system.sharding import start_devices  # annotations are checked from here on

    start_devices()
    _draw()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@hypothesis.settings(max_examples=1, database=None)
@hypothesis.given(hypothesis.strategies.none())
def _draw(_):
    pass


# Most of the time of the tests is compilation, and an operation of jnp outside of jit is a program
# for each shape: the last lines of a run tell when the number of programs grows.
_compiled = {"programs": 0, "seconds": 0.0}


def _count(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        _add({"programs": 1, "seconds": seconds})


def _add(compiled):
    for name in _compiled:
        _compiled[name] += compiled[name]


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist
        session.config.workeroutput |= {"compiled": _compiled, "left_out": sorted(_left_out)}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if output := getattr(node, "workeroutput", None):  # None of a process that died
        _add(output["compiled"])
        _left_out.update(output["left_out"])


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    text = "{programs} programs compiled, or read from the cache, in {seconds:.0f} s"
    terminalreporter.write_line(text.format(**_compiled))
    if _left_out:
        terminalreporter.write_line(f"left out on this machine: {'; '.join(sorted(_left_out))}")
    if (one_in := config.getoption("sample")) > 1:
        again = shlex.join(["python", "-m", "pytest", *config.invocation_params.args])
        terminalreporter.write_line(f"one in {one_in} tests; the same again: {again}")


@pytest.fixture
def x64():
    """float64 arrays during one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def unchecked_annotations():
    """Disables the checks of annotations, which precede the functions' own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
