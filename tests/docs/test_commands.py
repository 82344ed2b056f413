"""Runs every command that the documentation shows, as far as possible without training.

The texts are the Markdown pages, that of the notebooks, and the docstrings of modules. A command
begins with `rope_jax`, `python -m rope_jax...`, `python -m benchmarks` or
`make`, at the start of a line of code (behind variables, `srun` or `mpirun`), or is the whole of an
inline code. It continues after a backslash and ends before a comment or two spaces. Inline code may
leave out what the command requires.

The command's own parser and checks run, up to its computation; a recipe is resolved and prepared.
Its images are in `stand_ins`, and models, runs and weights are shapes.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import json
import re
import shlex
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import _runner, cpu
from rope_jax import config, create_model, data
from rope_jax.__main__ import COMMANDS
from rope_jax.analysis import plots
from rope_jax.commands import (
    analyse,
    arguments,
    compare,
    cost,
    evaluate,
    export,
    models,
    positions,
    prepare,
    report,
    reproduce,
    train,
    tune,
    verify,
    weights,
)
from rope_jax.data.sources import scenes
from rope_jax.evaluate import evaluation as one_evaluation
from rope_jax.names import plugins
from rope_jax.papers import plan
from rope_jax.positions.scheme import SCHEMES
from rope_jax.runs import loading, restore
from rope_jax.tasks import evaluator, segmentation
from rope_jax.training import setup
from rope_jax.weights import convert, create, files, links, load, metadata, own, released
from tests.docs import stand_ins
from tests.slow import some_slow

ROOT = stand_ins.ROOT
MAKEFILE = (ROOT / "Makefile").read_text()
PACKAGES = ("rope_jax", "benchmarks", "configs", "docs")
PROGRAM = r"rope_jax [a-z]|python -m benchmarks[._ ]|python -m rope_jax\.|make "
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ |srun |mpirun |-\S+ |\d+ )*((?:{PROGRAM}).*)")
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^(?: {4,}\S.*\n?)+", re.MULTILINE)
# Commands with these placeholders are forms.
FORMS = {
    " NAME": "any benchmark, experiment or paper",
    ".MODULE": "any module with a command",
    "...": "left out, or repeated",
}


def texts():
    """Each page, notebook and module, and its text."""
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "kernels/README.md")]
    for path in [*pages, *ROOT.glob("docs/**/*.md")]:
        yield path, path.read_text()
    for path in ROOT.glob("colabs/*.ipynb"):  # tests/colabs runs the code
        cells = json.loads(path.read_text())["cells"]
        shown = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        yield path, "\n\n".join(shown)
    for path in [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]:
        yield path, ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""


def commands(text):
    """Yields the commands of a text, each with True for inline code."""
    blocks = [code for language, code in FENCE.findall(text) if language != "python"]
    text = FENCE.sub("", text)
    lines = re.sub(r"\\\n *", "", "\n".join(blocks + INDENTED.findall(text))).splitlines()
    for line in lines:
        if match := COMMAND.fullmatch(re.split(" #|  ", line.strip())[0].strip()):
            yield match[1], False
    for code in re.findall(r"`([^`]+)`", INDENTED.sub("", text)):
        if match := COMMAND.fullmatch(" ".join(code.split())):
            yield match[1], True


PAGES = {str(path.relative_to(ROOT)): list(commands(text)) for path, text in sorted(texts())}
_IMPORT = re.compile(r"^from rope_jax\.commands\.(\w+) import (?:main|command)$", re.MULTILINE)
_NAMES = {module: name for name, (module, *_) in COMMANDS.items()}
# Module that `python -m` runs -> command, of those that `rope_jax` has, too.
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"): _NAMES[
        match[1]
    ]
    for path in (ROOT / "rope_jax").rglob("*.py")
    if (match := _IMPORT.search(path.read_text())) and match[1] in _NAMES
}


def split(command):
    """The program of a command, and its words; that of `python -m rope_jax.main` is "train"."""
    program, *words = shlex.split(command)
    if program == "rope_jax":
        count = 1 + (words[0] == "data")
        return " ".join(words[:count]), words[count:]
    if program == "python":
        package, _, module = words[1].partition(".")
        if package == "rope_jax":
            default = MODULES.get(f"{words[1]}.__main__", words[1])
            return MODULES.get(words[1], default), words[2:]
        return package, [*filter(None, [module]), *words[2:]]
    return program, words


def distinct():
    """(command, inline, page) of each command that is not a form, on the first page that has it."""
    unique_commands = {}
    for page, shown in PAGES.items():
        for command, inline in sorted(shown, key=lambda case: case[1]):
            if not any(mark in command for mark in FORMS):
                program, words = split(command)
                unique_commands.setdefault((program, *words), (command, inline, page))
    return list(unique_commands.values())


DISTINCT = distinct()


def test_commands_are_extracted_from_code():
    text = """Text with `python -m rope_jax.x --a` and `make\nit`; make it so.

```sh
make all X=1            # a comment
A=1 rope_jax train --a \\
    --b="c d"
mpirun -n 2 --x=y rope_jax train
from rope_jax import x
```
```python
rope_jax = 1
```
    rope_jax report a
"""
    assert list(commands(text)) == [
        ("make all X=1", False),
        ('rope_jax train --a --b="c d"', False),
        ("rope_jax train", False),
        ("rope_jax report a", False),
        ("python -m rope_jax.x --a", True),
        ("make it", True),
    ]


def test_every_page_has_commands():
    others = (
        "README.md",
        "docs/running.md",
        "rope_jax/commands/tune.py",
        "colabs/load_weights.ipynb",
    )
    assert all(PAGES[page] for page in [*others, *(x for x in PAGES if x.startswith("configs/"))])
    assert {split(command)[0] for command, *_ in DISTINCT} == set(RUNNERS)


# The recipe of runs that no page trains.
RUNS = {
    "runs/swin/s": "swin:variant=swin_s,position=rope_mixed",
    "runs/swin/s_rpb": "swin:variant=swin_s,position=rope_mixed+rpb",
    "runs/lape/deit_s": "lape:variant=deit_s16",
}
# The run whose weights `save_pretrained` wrote, where a page evaluates them.
SAVED = {
    "docs/own_images.md": "runs/flowers",
    "docs/segmentation.md": "runs/upernet",
    "docs/detection.md": "runs/dino",
    "rope_jax/commands/evaluate.py": "runs/upernet",
}


def test_commands_are_only_in_code():
    for path, text in texts():
        prose = INDENTED.sub("", FENCE.sub("", text))
        assert not re.search("^(python -m|rope_jax [a-z]+ -)", prose, re.MULTILINE), path


def training_words(workdir, page=""):
    """Words of the command that trains in a workdir: the page's last, or the first of any page."""
    if workdir in RUNS:
        return [f"--config={RUNS[workdir]},path=FOLDER", f"--workdir={workdir}"]
    for shown in (PAGES.get(page, [])[::-1], *PAGES.values()):
        for program, words in (split(command) for command, _ in shown):
            if program == "train" and f"--workdir={workdir}" in words:
                return words
    raise ValueError(f"no page trains {workdir}")


def parse_config(words):
    """The config of a training command."""
    _, parsed = train.parse(words)
    plugins.load(parsed.plugins)
    return parsed


@functools.cache
def prepare_run(requested):
    """The complete config of a run, and its model as shapes; the weights of `init_from` fit it."""
    completed = []

    def start():
        prepared, model = setup.prepare(requested)
        completed.append(prepared.config)
        if requested.init_from is not None:
            restore.start_from(model, requested.init_from, prepared.config.data)
        return model

    with pytest.MonkeyPatch.context() as patch:
        classifier = (requested.model.name, requested.model.position)
        patch.setattr(restore, "open_listed", lambda where: open_listed(where, *classifier))
        model = nnx.eval_shape(start)
    model.preprocessing = restore.run_preprocessing(completed[0].data, completed[0].eval.frame)
    return completed[0], model


@contextlib.contextmanager
def open_weights(where, name=None, position=None):
    """Weights of a run; for any other name, those of a classifier."""
    if where.startswith("runs/"):
        _, model = prepare_run(parse_config(training_words(where)))
    else:
        model = nnx.eval_shape(lambda: create_model(name, position=position))
    linked, _ = links.link_parameters(model, own.own(model), own.OWN)
    shapes = {link.key: (link.slot.shape, np.dtype("float32")) for link in linked}
    text = metadata.Metadata.from_model(model, {}).to_json()
    description = metadata.Metadata.from_json(text, where)
    yield files.WeightsFile(shapes, np.zeros, own.OWN, description, where)


def open_listed(where, *classifier, saved=None):
    """Opens published weights, an open file, or those of `open_weights`."""
    if isinstance(where, files.WeightsFile):
        return contextlib.nullcontext(where)
    published = isinstance(where, released.ReleasedWeights)
    return where.open() if published else open_weights(saved or where, *classifier)


def load_pretrained(model, where, *, source):
    """Loads a classifier's weights; for a source, checks only that it names the model's."""
    if source is not None:
        convert.name_table(model, source)
    else:
        with open_weights(where, model.name, model.notation) as file:
            load.load_weights(model, file)


class Reached(Exception):
    """Raised when a command begins to compute."""


def compute(*_, **__):
    raise Reached


def see(evaluator, images, *_):
    """Traces a model on an image of a set; images with boxes are padded."""
    if not images.labels_kind.ragged:
        evaluator.apply(evaluator.weights, jnp.zeros((1, *images.size, 3)))
    raise Reached


CANVASES = data.canvases_of


def row(evaluation, *_):
    """Computes a row of `evaluate`, up to its computation."""

    def begin(model):
        dataclasses.replace(evaluation, model=model).row()

    evaluation.identity()
    evaluation.folder.mkdir(parents=True, exist_ok=True)  # the workdir, which is none
    with contextlib.suppress(Reached):
        nnx.eval_shape(begin, evaluation.model)
    return {"dataset": "", "protocol": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that commands name; registrations end with these tests."""
    stand_in_folder, before = tmp_path_factory.mktemp("stand_ins"), list(sys.path)
    stand_ins.write(stand_in_folder)
    yield stand_in_folder
    sys.path[:] = before
    for registry in (SCHEMES, sys.modules, plugins._loaded):
        for name in ("rope_log", "my_schemes"):
            registry.pop(name, None)
    prepare_run.cache_clear()


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """A function that runs a command of a page; returns its error, or ""."""
    page = ""

    def read_checkpoint(workdir, *, step=None, ema=None, seed=None):
        run_config, model = prepare_run(parse_config(training_words(workdir, page)).single(seed))
        return nnx.clone(model), run_config, 1

    monkeypatch.chdir(folder)
    monkeypatch.setenv("ROPE_JAX_CACHE", str(folder / "cache"))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # as benchmarks set it
    shapes = lambda *name, **options: nnx.eval_shape(lambda: create_model(*name, **options))
    for module, name, stand_in in (
        (scenes, "COUNTS", {"train": 128, "test": 8}),
        (data, "canvases_of", lambda *asked: CANVASES(*asked)[:1]),  # each takes seconds
        (arguments, "cores", lambda: 0),
        (load, "fill", lambda _, plan, read, source, where: convert.refuse(plan.problems, source)),
        (create, "open_listed", lambda where, _: open_listed(where, saved=SAVED.get(page))),
        # Nothing is downloaded.
        (
            released.ReleasedWeights,
            "open",
            lambda weights, *_: open_weights(weights.tag, weights.model, weights.position),
        ),
        (released.ReleasedWeights, "locate", lambda *_: "weights"),
        (loading, "create_model", shapes),
        (loading.LoadedModel, "at", lambda loaded, _: loaded.model),
        (loading, "load_pretrained", load_pretrained),
        (loading, "read_checkpoint", read_checkpoint),
        (loading, "file_sha256", str),
        (one_evaluation.Evaluation, "record", row),
        (evaluator.Evaluator, "count", see),
        (evaluate, "results_table", compute),
        (analyse, "analyse_model", compute),
        (report, "read_runs", lambda workdir: training_words(str(workdir), page) and []),
        (report, "print_report", compute),
        (reproduce, "read_runs", lambda _: []),
        (reproduce, "estimate", lambda *_: plan.Estimate(0.0)),
        (export, "export", lambda model, _, **asked: model.check_size(asked["resolution"])),
        (segmentation, "segment_split", compute),
        (plots, "costs", compute),
        (positions, "parameters", compute),
    ):
        monkeypatch.setattr(module, name, stand_in)

    def run(command, shown_on):
        nonlocal page
        page, (program, words) = shown_on, split(command)
        if program not in RUNNERS:
            return f"{program} is not a command"
        try:
            status = RUNNERS[program](words)
        except Reached:
            status = None
        except SystemExit as error:
            status = error.code
        except (config.ConfigError, ValueError, OSError) as error:
            status = str(error)
        errors = capsys.readouterr().err
        # A warmup of 500 steps is longer than 36 epochs of a stand-in for COCO.
        warnings = re.findall("WARNING: .* epochs of warmup", errors)
        warned = errors.count("WARNING") > len(warnings)
        return f"{status} {errors}" if status or warned else ""

    return run


def train_model(words):
    prepare_run(parse_config(words))


def compare_schemes(words):
    first, *_ = compare.plan(compare._parse(words)).values()  # which creates the models of all
    prepare_run(first)


def prepare_images(words):
    shutil.rmtree("PACKED", ignore_errors=True)
    return prepare.main(words)


def make(words):
    for word in words:
        name, is_variable, _ = word.partition("=")
        used = rf"\$\({name}\)" if is_variable else rf"^{name}:"
        if not re.search(used, MAKEFILE, re.MULTILINE):
            sys.exit(f"the Makefile has no {word}")


def measure(words):
    """Runs the parser of a benchmark, and prepares the recipe of `cpu`."""
    if not (ROOT / "benchmarks" / f"{words[0]}.py").exists():
        return _runner.main(words)
    module, recorded = importlib.import_module(f"benchmarks.{words[0]}"), {}
    with pytest.MonkeyPatch.context() as patch:
        note = lambda _, *flags, **options: recorded.update(options, flags=flags)
        patch.setattr(module, "run", functools.wraps(module.run)(note))
        status = _runner.main(words)
    if module is cpu:
        prepare_run(cpu.make_config(recorded["recipe"], recorded["flags"]))
    return status


# By the program that `split` names.
RUNNERS = {
    "train": train_model,
    "evaluate": evaluate.main,
    "analyse": analyse.main,
    "compare": compare_schemes,
    "report": report.main,
    "reproduce": lambda words: reproduce.main([*words, "--plan"]),  # which prints all runs
    "export": export.main,
    "tune": tune.main,
    "data verify": verify.main,
    "data prepare": prepare_images,
    "models": models.main,
    "weights": weights.main,
    "positions": positions.main,
    "rope_jax.models.cost": cost.main,
    "rope_jax.config": lambda words: print(config.settings_help()),
    "benchmarks": measure,
    "make": make,
}
# Errors about missing arguments, which inline code may omit.
MISSING = r"arguments are required|--\w+ is missing|name either the WORKDIR"


# Those of the README, and one of each program.
QUICK = {split(case[0])[0]: case for case in reversed(DISTINCT)}.values()
QUICK = [case for case in DISTINCT if case in QUICK or case[2] == "README.md"]


@pytest.mark.parametrize(
    ("command", "inline", "page"), some_slow(DISTINCT, QUICK), ids=[x for x, *_ in DISTINCT]
)
def test_documented_commands_run(command, inline, page, run):
    wrong = run(command, page)
    assert not wrong or (inline and re.search(MISSING, wrong)), f"{page}: {wrong}"


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("rope_jax trian", "trian is not a command"),
        ("rope_jax evaluate runs/digits --sizes=8", "unrecognized arguments: --sizes=8"),
        ("rope_jax evaluate runs/digits --resolutions=7", "7x7 is not divisible by the patch"),
        ("rope_jax evaluate runs/nowhere", "no page trains runs/nowhere"),
        ("rope_jax evaluate runs/own --flip", "--flip is for models that segment images"),
        ("rope_jax train --config=digits:epoch=3 --workdir=x", "no argument 'epoch'"),
        ("rope_jax train --config=digits --workdir=x --config.eval.resolutions=(7,)", "7x7"),
        ("rope_jax train --config=own_images:path=NOWHERE --workdir=x", "NOWHERE"),
        ("rope_jax train --config=finetune:path=IMAGES,weights=runs/cat_5 --workdir=x", "family"),
        ("rope_jax compare --path=IMAGES --positions=ape", "has nothing to compare"),
        ("python -m benchmarks cpus", "invalid choice"),
        ("python -m benchmarks cpu -- model.name=vit_s17", "unknown model 'vit_s17'"),
        ("make trian", "the Makefile has no trian"),
        ("make train DIR=runs/x", "the Makefile has no DIR=runs/x"),
    ],
)
def test_broken_commands_are_detected(command, wrong, run):
    assert wrong in run(command, "README.md")
