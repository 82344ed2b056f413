"""Allowed imports, their cost, and code that the packages must not contain."""

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
    wrong = []
    for name in MODULES:
        allowed = below(find_floor(name))
        internal = {imported for imported in IMPORTS[name] if imported.split(".")[0] in HOUSES}
        wrong += [
            f"{name} imports {imported}"
            for imported in internal
            if find_floor(imported) not in allowed
        ]
    assert wrong == []


def test_modules_import_only_packages_of_their_floor():
    wrong, free = [], HOUSES.keys() | sys.stdlib_module_names
    for name in MODULES:
        allowed = FLOORS[find_floor(name)][1].split()
        packages = {full for full in IMPORTS[name] if full.split(".")[0] not in free}
        wrong += [
            f"{name} imports {full}"
            for full in packages
            if not any(within(full, group) for group in allowed)
        ]
    assert wrong == []


def test_imports_have_no_cycles():
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
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["loaded"]


FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__", "yaml.load", "os.system"}


def find_dangers(tree, imports):
    calls = {name for name in imports if name.split(".")[0] in FORBIDDEN_MODULES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            calls |= {ast.unparse(node.func)} & FORBIDDEN_CALLS
            calls |= {
                k.arg
                for k in node.keywords
                if k.arg in ("allow_pickle", "shell") and ast.unparse(k.value) != "False"
            }
            if ast.unparse(node.func) in ("np.load", "numpy.load") and "allow_pickle" not in {
                k.arg for k in node.keywords
            }:
                calls.add("np.load without allow_pickle=False")
    return calls


def test_packages_run_no_code_from_data():
    dangers_by_module = {name: find_dangers(tree, IMPORTS[name]) for name, tree in TREES.items()}
    assert {
        name: module_dangers for name, module_dangers in dangers_by_module.items() if module_dangers
    } == {}


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
        listed = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        return [ROOT / line for line in listed.splitlines()]
    return [
        path
        for path in ROOT.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]


def test_files_name_no_machine_folders():
    files = [path for path in list_files() if path.suffix in TEXT and path.is_file()]
    assert ROOT / "pyproject.toml" in files
    occurrences = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
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
