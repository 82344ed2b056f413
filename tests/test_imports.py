"""Who may import whom, what an import may cost, and what the packages must not contain."""

import ast
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

import jaxtyping
import pytest

ROOT = pathlib.Path(__file__).parents[1]
HOUSES = {"rope_jax": ROOT / "rope_jax", "rope_jax_kernels": ROOT / "kernels" / "rope_jax_kernels", "configs": ROOT / "configs"}


def module_name(path):
    house = next(name for name, folder in HOUSES.items() if path.is_relative_to(folder))
    parts = path.relative_to(HOUSES[house]).with_suffix("").parts
    return ".".join([house, *parts]).removesuffix(".__init__")


MODULES = {module_name(path): path for folder in HOUSES.values() for path in sorted(folder.rglob("*.py"))}


def imports_of(name, tree, modules):
    """Full names of all modules that a module imports, wherever in the file it does."""
    package = name if modules[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            inside = {f"{source}.{alias.name}" for alias in node.names}
            found |= {full if full in modules else source for full in inside}
    return found


TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
IMPORTS = {name: imports_of(name, tree, MODULES) for name, tree in TREES.items()}


def within(name, group):
    return name == group or name.startswith(group + ".")


HINTS = ["rope_jax.hints"]
POSITIONS = ["rope_jax.positions", "rope_jax.initializers", "rope_jax_kernels", *HINTS]
MODELS = ["rope_jax.models", "rope_jax.sharding", *POSITIONS]
CONFIG = ["rope_jax.config", "rope_jax.settings", *HINTS]
DATA = ["rope_jax.data"]
WORKDIR = ["rope_jax.workdir"]
PLAIN = [*WORKDIR, "rope_jax.sharding", "rope_jax.checkpoint", "rope_jax.metrics", "rope_jax.optim", "rope_jax.losses"]
RESTORE = ["rope_jax.restore", "rope_jax.members", *CONFIG, *MODELS, *PLAIN]
EVALUATE = ["rope_jax.evaluate", "rope_jax.subject", "rope_jax.analysis.plots", *DATA, *RESTORE]
ARRAYS = ["jax", "numpy", "jaxtyping"]

# Module or package -> what it may import of this repository, and what of others (the standard library is free). The longest name
# that fits a module is its rule.
RULES = {
    "rope_jax_kernels": (["rope_jax_kernels"], ARRAYS),
    "rope_jax.positions": (POSITIONS, [*ARRAYS, "flax.nnx"]),
    "rope_jax.positions.__main__": (MODELS, ["flax.nnx"]),  # a program beside the schemes: it counts their parameters in a model
    "rope_jax.models": (MODELS, [*ARRAYS, "flax.nnx"]),
    "rope_jax.models.pretrained.files": (MODELS, [*ARRAYS, "flax.nnx", "safetensors", "huggingface_hub"]),
    "rope_jax.optim": (CONFIG, ["jax", "numpy", "jaxtyping", "optax", "flax.nnx"]),  # nnx: what the parameters say about their decay
    "rope_jax.compilation": ([], ["jax"]),
    "rope_jax.losses": ([], [*ARRAYS, "optax"]),
    "rope_jax.sharding": ([], ARRAYS),
    "rope_jax.workdir": ([], []),
    "rope_jax.checkpoint": (WORKDIR, [*ARRAYS, "orbax"]),
    "rope_jax.metrics": (WORKDIR, [*ARRAYS, "tensorboardX"]),
    "rope_jax.data": (DATA, ["numpy", "jaxtyping", "PIL", "sklearn"]),
    "rope_jax.data.tfds": (DATA, ["numpy", "tensorflow_datasets"]),
    "rope_jax.data.imagenet": (DATA, ["numpy", "scipy"]),
    "rope_jax.data.workers": (DATA, ["numpy", "grain", "absl"]),
    "rope_jax.data.on_device": (DATA, ARRAYS),
    "rope_jax.data.image_ops": (DATA, ARRAYS),
    "rope_jax.data.cuts": (DATA, [*ARRAYS, "PIL"]),
    "rope_jax.hints": ([], []),
    "rope_jax.initializers": ([], ARRAYS),
    "rope_jax.settings": ([], []),
    "rope_jax.config": (CONFIG, ["ml_collections"]),
    "rope_jax.members": (CONFIG, [*ARRAYS, "flax.nnx"]),
    "rope_jax.restore": (RESTORE, [*ARRAYS, "flax.nnx"]),
    "rope_jax.evaluate": (EVALUATE, [*ARRAYS, "flax.nnx"]),
    "rope_jax.program": (MODELS, [*ARRAYS, "flax.nnx"]),
    "rope_jax.subject": (RESTORE, [*ARRAYS, "flax.nnx"]),
    "rope_jax.signals": (["rope_jax.sharding"], ["jax"]),
    "rope_jax.run": (EVALUATE, [*ARRAYS, "flax.nnx", "optax"]),
    "rope_jax.train": (["rope_jax.run", "rope_jax.signals", *EVALUATE], [*ARRAYS, "flax.nnx"]),
    "rope_jax.main": (
        ["rope_jax.compilation", "rope_jax.train", "rope_jax.signals", "rope_jax.sharding", "rope_jax.evaluate", *CONFIG, *WORKDIR],
        ["absl", "ml_collections"],
    ),
    "rope_jax.analysis": (MODELS, [*ARRAYS, "flax.nnx"]),
    "rope_jax.analysis.plots": ([], ["numpy", "matplotlib"]),
    # Programs beside main: they read what runs wrote.
    "rope_jax.analysis.__main__": (["rope_jax.analysis", *EVALUATE], [*ARRAYS, "flax.nnx"]),
    "rope_jax.analysis.report": (
        ["rope_jax.analysis", *CONFIG, "rope_jax.members", "rope_jax.models.registry", "rope_jax.evaluate", "rope_jax.metrics"],
        ["numpy", "scipy.special"],
    ),
    # __init__ alone: the public names.
    "rope_jax": (["rope_jax.models", "rope_jax.positions", "rope_jax.program", "rope_jax.restore", "rope_jax.data"], []),
    "configs": (CONFIG, ["ml_collections"]),
}


def rule_of(name):
    fitting = [group for group in RULES if (name == group if group == "rope_jax" else within(name, group))]
    assert fitting, f"{name} is new: say in RULES what it may import"
    return RULES[max(fitting, key=len)]


@pytest.mark.parametrize("name", MODULES)
def test_modules_import_what_the_design_lets_them(name):
    own, others = rule_of(name)
    for imported in IMPORTS[name]:
        if imported.split(".")[0] in HOUSES:
            assert any(within(imported, group) for group in own), f"{name} must not import {imported}"
        elif imported.split(".")[0] not in sys.stdlib_module_names:
            whole = {imported} | {
                f"{imported}.{alias.name}"
                for node in ast.walk(TREES[name])
                if isinstance(node, ast.ImportFrom) and node.module == imported
                for alias in node.names
            }
            assert any(within(full, group) for full in whole for group in others), f"{name} must not import {imported}"


def test_no_module_imports_itself_round_a_circle():
    done = []

    def visit(name, path):
        assert name not in path, f"a circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for imported in sorted(IMPORTS[name] & MODULES.keys()):
                visit(imported, [*path, name])
            done.append(name)

    for name in MODULES:
        visit(name, [])
    assert len(done) == len(MODULES)


def test_the_reader_of_imports_sees_every_form():
    source = "import a.b\nfrom c import d\ndef f():\n    from .e import g\n    from . import h\nfrom rope_jax import i\n"
    modules = {name: pathlib.Path(f"{name}.py") for name in ("rope_jax.x.y", "rope_jax.i", "rope_jax.x.h")}
    found = imports_of("rope_jax.x.y", ast.parse(source), modules)
    assert found == {"a.b", "c", "rope_jax.x.e", "rope_jax.x.h", "rope_jax.i"}


HEAVY = ["tensorflow", "tensorflow_datasets", "grain", "matplotlib", "sklearn", "scipy.stats", "tensorboardX", "wandb", "safetensors"]


@pytest.mark.parametrize(
    ("package", "unwanted"),
    [("rope_jax", [*HEAVY, "huggingface_hub", "beartype"]), ("rope_jax_kernels", [*HEAVY, "flax", "optax", "orbax", "rope_jax"])],
)
def test_importing_costs_no_more_than_it_must(package, unwanted):
    script = f"import sys, {package}; print('loaded', *sorted(set({unwanted!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["loaded"]


FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__", "yaml.load", "os.system"}


def dangers(tree, imports):
    found = {name for name in imports if name.split(".")[0] in FORBIDDEN_MODULES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found |= {ast.unparse(node.func)} & FORBIDDEN_CALLS
            found |= {k.arg for k in node.keywords if k.arg in ("allow_pickle", "shell") and ast.unparse(k.value) != "False"}
            if ast.unparse(node.func) in ("np.load", "numpy.load") and "allow_pickle" not in {k.arg for k in node.keywords}:
                found.add("np.load without allow_pickle=False")
    return found


@pytest.mark.parametrize("name", MODULES)
def test_nothing_runs_code_out_of_data(name):
    assert dangers(TREES[name], IMPORTS[name]) == set()


def test_dangers_are_seen():
    source = "import pickle\neval(x)\nyaml.load(f)\nnp.load(f, allow_pickle=True)\nnp.load(f)\nast.literal_eval(x)\nmodel.eval()\n"
    assert dangers(ast.parse(source), {"pickle"}) == {"pickle", "eval", "yaml.load", "allow_pickle", "np.load without allow_pickle=False"}


MACHINE_PATH = re.compile(r"(?<![\w.:/~}])/(?:home|root|work|users|mnt|media|scratch)/\w", re.IGNORECASE)
TEXT = {".py", ".toml", ".md", ".json", ".cfg", ".txt", ".yml", ".yaml", ".ipynb", ".cff", ".sh", ""}


def tracked_files():
    """Files of the repository; of an unpacked archive, which has no index, all that are not hidden."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-co", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [ROOT / line for line in listed.splitlines()]
    return [path for path in ROOT.rglob("*") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]


def test_no_file_names_a_folder_of_some_machine():
    files = [path for path in tracked_files() if path.suffix in TEXT and path.is_file()]
    assert ROOT / "pyproject.toml" in files
    found = [f"{path.relative_to(ROOT)}: {match[0]}" for path in files for match in MACHINE_PATH.finditer(path.read_text())]
    assert found == []
    assert MACHINE_PATH.search("open('" + "/home" + "/someone/x')")


def test_annotations_are_checked_while_tests_run():
    from rope_jax.positions.resample import bicubic
    from rope_jax_kernels.rotation import Rotation

    with pytest.raises(jaxtyping.TypeCheckError):
        bicubic("a map", (3, 4))
    with pytest.raises(jaxtyping.TypeCheckError):
        Rotation(None, None, pairing="thirds")
