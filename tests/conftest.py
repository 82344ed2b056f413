"""Checks every annotation of the two packages while tests run, and offers what many tests need."""

import gc
import importlib.util
import os
import signal
import sys
import tempfile

import jax
import jaxtyping
import pytest

_PACKAGES = ("rope_jax", "rope_jax_kernels")
if imported := sorted(name for name in sys.modules if name.split(".")[0] in _PACKAGES):
    raise RuntimeError(
        f"{imported} were imported before their annotations could be checked: remove the plugin "
        "that does so"
    )
# Shapes, dtypes and types of all arguments and results: a wrong annotation fails the test.
jaxtyping.install_import_hook(_PACKAGES, "beartype.beartype")
# Some tests send these, which are ignored in what `nohup` or a script's `&` starts.
for number, handler in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


# The older of XLA's two generators of code for CPUs, which takes half of the time of the newer.
QUICK = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"


def compiles_quickly() -> bool:
    """Whether programs are compiled fast and run slowly: most programs of the tests run once.

    Not where jax's plugin for GPUs is: tests/aot and tests/gpu judge what users compile. And not
    with ROPE_JAX_TEST_OPTIMIZED=1, for a run of any tests as users compile.
    """
    optimized = os.environ.get("ROPE_JAX_TEST_OPTIMIZED") == "1"
    return not (optimized or importlib.util.find_spec("jax_plugins"))


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


def pytest_collection_modifyitems(items):
    """Skips tests marked `gpu` without a GPU, unless they are rehearsed (see tests/gpu)."""
    marked = [item for item in items if "gpu" in item.keywords]
    rehearsed = os.environ.get("ROPE_JAX_REHEARSE_GPU_TESTS") == "1"
    if marked and not rehearsed and jax.default_backend() != "gpu":
        reason = f"needs a GPU, but jax runs on {jax.default_backend()}"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """Starts the devices as commands do, and makes the collection of garbage rare.

    Commands that are called in this process would start one device a core. Garbage is collected
    less often, and not among what was imported: a tenth of the tests' time.
    """
    from rope_jax.sharding import start_devices  # annotations are checked from here on

    start_devices()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


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
        session.config.workeroutput["compiled"] = _compiled


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    _add(getattr(node, "workeroutput", {}).get("compiled", {"programs": 0, "seconds": 0.0}))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    text = "{programs} programs compiled, or read from the cache, in {seconds:.0f} s"
    terminalreporter.write_line(text.format(**_compiled))


@pytest.fixture
def x64():
    """float64 arrays during one test."""
    with jax.enable_x64(True):
        yield
