"""The command `rope_jax`: its sub-commands, and the help of each."""

import contextlib
import os
import re
import subprocess
import sys

import pytest

from rope_jax import __main__ as command
from rope_jax import config as cfg

DIGITS = ["--model=vit_digits", "--options=depth=1,width=16,heads=1"]


def call(monkeypatch, capsys, *words):
    """Exit status, standard output and standard error of `rope_jax WORDS`."""
    monkeypatch.setattr(sys, "argv", ["bin/rope_jax", *words])
    status = 0
    try:
        command.main()
    except SystemExit as error:
        status = error.code or 0
    return status, *capsys.readouterr()


_HELP = """
import runpy, sys
sys.argv = ['rope_jax', '--help']
runpy.run_module('rope_jax', run_name='__main__')
print('loaded', *sorted({'jax', 'flax', 'numpy'} & sys.modules.keys()))
"""


def test_listing_commands_does_not_import_jax():
    done = subprocess.run([sys.executable, "-c", _HELP], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded"
    assert all(f"  {name} " in done.stdout for name in command.COMMANDS)


@pytest.mark.parametrize("name", [name for name in command.COMMANDS if name != "train"])
def test_help_lists_types_and_defaults(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    status, output, _ = call(monkeypatch, capsys, *name.split(), "--help")
    assert status == 0
    assert output.startswith(f"usage: rope_jax {name} ")
    text = " ".join(output.split())
    arguments = re.findall(r"--(\w+) [A-Z]", text[text.index("options:") :])
    kinds = re.findall(r"\((?:text|a path|a whole number|a number|2 values)\b", text)
    assert len(kinds) >= len(arguments)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "run", "--batch_size=0"], "--batch_size: must be a whole number"),
        (["evaluate", "run", "--crop=1.5"], "--crop: must be a number above 0"),
        (["tune", "--model=vit_s16", "--batch=x"], "must be a whole number of at least 1, not 'x'"),
        (["tune", "--model=vit_digit"], "vit_digits"),
        (["tune", "--model=vit_digits", "--batch=4", "--resolution=x"], "[--model"),
        (["evaluate", "nothing"], "rope_jax evaluate: nothing does not exist; pass the WORKDIR of"),
        (["evaluate", "run", "--scales=1,0"], "--scales: must be a number above 0 and at most 16"),
        (["analyse", "maps", "--query=a"], "--query: must be 2 values, each a number"),
        (["analyse", "fourier", *DIGITS, "--position=ape"], "rotates nothing by coordinates"),
        (["analyse", "learned", *DIGITS], "axial_rope has no learned frequencies"),
        (["analyse", "learned", *DIGITS, "--position=rope_mixed", "--stage=2"], "--stage=2"),
        (["analyse", "correlation", *DIGITS], "adds no embedding to the tokens"),
        (["analyse", "attention", *DIGITS], "--images is missing: pass a file or a folder"),
        (["analyse", "decay"], "name either the WORKDIR of a run or a --model"),
        (["analyse", "costs", "--model=vit"], "unknown model 'vit'"),
        (["report", "nothing"], "nothing does not exist; complete its run first: rope_jax train"),
        (["models", "nothing*"], "rope_jax models: no model is called 'nothing*'"),
        (["trian"], "'trian' is not a command; did you mean 'train'?"),
        (["data", "verfy"], "'data verfy' is not a command; did you mean 'data verify'?"),
        (["compare", "--config=digits", "--seed=3"], "use --config.seed"),  # not --seeds
        (["train", "--config=digits"], "arguments are required: --workdir"),
        (["train", "--workdir=x"], "arguments are required: --config"),
        (["train", "--config=digit", "--workdir=x"], "not a recipe; did you mean 'digits'"),
        (["train", "--config=a/b.py", "--workdir=x"], "--config=a/b.py is not a recipe"),
    ],
)  # fmt: skip
def test_mistakes_are_named(words, message, monkeypatch, capsys):
    status, _, errors = call(monkeypatch, capsys, *words)
    assert (status, errors.count("\n")) == (2, 1)
    assert message in errors


def test_a_group_lists_its_commands(monkeypatch, capsys):
    _, output, _ = call(monkeypatch, capsys, "data", "--help")
    assert "data verify" in output
    assert "evaluate" not in output


def test_training_help_lists_flags_recipes_and_settings(monkeypatch, capsys):
    _, output, _ = call(monkeypatch, capsys, "train", "--help")
    assert "--workdir WORKDIR folder of the run" in " ".join(output.split())
    assert all(name in output for name in cfg.list_recipes())
    assert output.endswith(cfg.settings_help() + "\n")
    _, settings, _ = call(monkeypatch, capsys, "train", "--config=digits", "--config.help")
    assert settings == cfg.settings_help() + "\n"


def test_models_are_listed_by_pattern(monkeypatch, capsys):
    _, output, _ = call(monkeypatch, capsys, "models", "vit_digits", "--parameters")
    assert output.splitlines()[-1].split()[:4] == ["vit_digits", "axial_rope", "8", "10"]
    assert int(output.split()[-1].replace(",", "")) > 10_000


@pytest.mark.parametrize("words", [["positions"], ["data", "verify", "--help"], ["--help"]])
def test_closed_pipes_are_not_errors(words, monkeypatch):
    """For example in `rope_jax positions | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "argv", ["bin/rope_jax", *words])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        with contextlib.suppress(SystemExit):
            command.main()
        sys.stdout.flush()  # as at the end of a process
    with contextlib.suppress(BrokenPipeError):
        stream.close()
