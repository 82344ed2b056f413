"""Allowed imports, their cost, and code that the packages must not contain."""

import ast
import graphlib
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

import jaxtyping
import pytest

ROOT = pathlib.Path(__file__).parents[1]
HOUSES = {
    "rope_jax": ROOT / "rope_jax",
    "rope_jax_kernels": ROOT / "kernels" / "rope_jax_kernels",
    "configs": ROOT / "configs",
}


def module_name(path):
    house = next(name for name, folder in HOUSES.items() if path.is_relative_to(folder))
    parts = path.relative_to(HOUSES[house]).with_suffix("").parts
    return ".".join([house, *parts]).removesuffix(".__init__")


MODULES = {
    module_name(path): path for folder in HOUSES.values() for path in sorted(folder.rglob("*.py"))
}


def find_imports(name, tree, modules):
    """Full names of all modules that a module imports, anywhere in the file."""
    package = name if modules[name].name == "__init__.py" else name.rpartition(".")[0]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            inside = {f"{source}.{alias.name}" for alias in node.names}
            names |= {full if full in modules else source for full in inside}
    return names


TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
IMPORTS = {name: find_imports(name, tree, MODULES) for name, tree in TREES.items()}


def within(name, group):
    return name == group or name.startswith(group + ".")


ARRAYS = "jax numpy jaxtyping"

# The floors of the house, from the ground up. Room -> rooms that it may import, on top of itself
# and what those may import; and packages of others (the standard library is free).
FLOORS = {
    "rope_jax_kernels": ("", ARRAYS),
    "rope_jax.system": ("", ARRAYS),
    "rope_jax.names": ("system", ""),
    "rope_jax.positions": ("rope_jax_kernels names", f"{ARRAYS} flax scipy.interpolate"),
    "rope_jax.data": (
        "names",
        f"{ARRAYS} PIL absl datasets grain pycocotools scipy sklearn tensorflow_datasets",
    ),
    "rope_jax.models": ("positions", f"{ARRAYS} flax optax"),
    "rope_jax.config": ("names", "ml_collections"),
    "rope_jax.weights": ("models", f"{ARRAYS} flax safetensors huggingface_hub requests tqdm"),
    "rope_jax.tasks": ("config data models", f"{ARRAYS} flax optax pycocotools PIL"),
    "rope_jax.training": ("tasks weights", f"{ARRAYS} flax optax orbax tensorboardX"),
    "rope_jax.evaluate": ("training", f"{ARRAYS} flax PIL matplotlib"),
    "rope_jax.runs": ("evaluate", f"{ARRAYS} flax"),
    "rope_jax.analysis": ("runs", f"{ARRAYS} flax matplotlib scipy.special"),
    "rope_jax.papers": ("analysis", f"{ARRAYS} flax"),
    "rope_jax.commands": ("papers", f"{ARRAYS} flax"),
    "rope_jax": ("commands", ""),  # the public names, and `python -m` of the commands
    "configs": ("config", "ml_collections"),
}
PASSES_ON = re.compile(r"from |import |__all__ = |if __name__ == ")


def is_stub(name):
    """True if a module only forwards: to a `python -m` command, or from a former name."""
    body = TREES[name].body[1:]  # after the docstring
    has_content = MODULES[name].name == "__init__.py" or not body
    return not has_content and all(PASSES_ON.match(ast.unparse(node)) for node in body)


def full_name(group):
    return group if group in FLOORS else f"rope_jax.{group}"


def below(group):
    """A group and all groups that it may import."""
    return {group}.union(*(below(full_name(name)) for name in FLOORS[group][0].split()))


def find_floor(name):
    room = ".".join(name.split(".")[:2]) if within(name, "rope_jax") else name.split(".")[0]
    if room in ("rope_jax", "rope_jax.__main__") or is_stub(name):
        return "rope_jax"
    assert room in FLOORS, f"{name} is new: give its room a floor"
    return room


def test_modules_import_only_lower_floors():
    wrong = [
        f"{name} imports {imported}"
        for name in MODULES
        for imported in IMPORTS[name]
        if imported.split(".")[0] in HOUSES and find_floor(imported) not in below(find_floor(name))
    ]
    assert wrong == []


def test_modules_import_only_packages_of_their_floor():
    free = HOUSES.keys() | sys.stdlib_module_names
    wrong = [
        f"{name} imports {full}"
        for name in MODULES
        for full in IMPORTS[name]
        if full.split(".")[0] not in free
        and not any(within(full, group) for group in FLOORS[find_floor(name)][1].split())
    ]
    assert wrong == []


def test_imports_have_no_cycles():
    inside = {name: imports & MODULES.keys() for name, imports in IMPORTS.items()}
    graphlib.TopologicalSorter(inside).prepare()  # names the modules of a cycle


def test_all_forms_of_imports_are_found():
    source = "import a.b\nfrom c import d\ndef f():\n    from .e import g\n    from . import h\n"
    source += "from rope_jax import i\n"
    modules = {
        name: pathlib.Path(f"{name}.py") for name in ("rope_jax.x.y", "rope_jax.i", "rope_jax.x.h")
    }
    names = find_imports("rope_jax.x.y", ast.parse(source), modules)
    assert names == {"a.b", "c", "rope_jax.x.e", "rope_jax.x.h", "rope_jax.i"}


HEAVY = [
    "datasets",
    "tensorflow",
    "tensorflow_datasets",
    "grain",
    "matplotlib",
    "sklearn",
    "scipy.stats",
    "tensorboardX",
    "wandb",
    "safetensors",
]


@pytest.mark.parametrize(
    ("package", "unwanted"),
    [
        ("rope_jax", [*HEAVY, "huggingface_hub", "beartype"]),
        ("rope_jax.data", HEAVY),
        ("rope_jax_kernels", [*HEAVY, "flax", "optax", "orbax", "rope_jax"]),
    ],
)
def test_imports_load_no_heavy_packages(package, unwanted):
    script = (
        f"import sys, {package}; print('loaded', *sorted(set({unwanted!r}) & sys.modules.keys()))"
    )
    output = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=120)
    assert output.split() == ["loaded"]


FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__", "yaml.load", "os.system"}


def find_dangers(tree, imports):
    calls = {name for name in imports if name.split(".")[0] in FORBIDDEN_MODULES}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, keywords = (
            ast.unparse(call.func),
            {k.arg: ast.unparse(k.value) for k in call.keywords},
        )
        calls |= {name} & FORBIDDEN_CALLS
        calls |= {k for k in ("allow_pickle", "shell") if keywords.get(k, "False") != "False"}
        if name in ("np.load", "numpy.load") and "allow_pickle" not in keywords:
            calls.add("np.load without allow_pickle=False")
    return calls


def test_packages_run_no_code_from_data():
    dangers = {name: find_dangers(tree, IMPORTS[name]) for name, tree in TREES.items()}
    assert not any(dangers.values()), {name: calls for name, calls in dangers.items() if calls}


def test_dangers_are_detected():
    source = "import pickle\neval(x)\nyaml.load(f)\nnp.load(f, allow_pickle=True)\nnp.load(f)\n"
    source += "ast.literal_eval(x)\nmodel.eval()\n"
    assert find_dangers(ast.parse(source), {"pickle"}) == {
        "pickle",
        "eval",
        "yaml.load",
        "allow_pickle",
        "np.load without allow_pickle=False",
    }


MACHINE_PATH = re.compile(
    r"(?<![\w.:/~}])/(?:home|root|work|users|mnt|media|scratch)/\w", re.IGNORECASE
)
TEXT = {
    ".py",
    ".toml",
    ".md",
    ".json",
    ".cfg",
    ".txt",
    ".yml",
    ".yaml",
    ".ipynb",
    ".cff",
    ".sh",
    "",
}


def list_files():
    """Files of the repository; without an index, as in an unpacked archive, all visible ones."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-co", "--exclude-standard"]
        return subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    names = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
    return [str(name) for name in names if not any(part.startswith(".") for part in name.parts)]


def test_files_name_no_machine_folders():
    files = [ROOT / name for name in list_files() if pathlib.Path(name).suffix in TEXT]
    assert ROOT / "pyproject.toml" in files
    occurrences = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.is_file()
        for match in MACHINE_PATH.finditer(path.read_text())
    ]
    assert occurrences == []
    assert MACHINE_PATH.search("open('" + "/home" + "/someone/x')")


def test_annotations_are_checked_while_tests_run():
    from rope_jax.positions.resample import resample
    from rope_jax_kernels.rotation import Rotation

    with pytest.raises(jaxtyping.TypeCheckError):
        resample("a map", (3, 4), "bicubic")
    with pytest.raises(jaxtyping.TypeCheckError):
        Rotation(None, None, pairing="thirds")
