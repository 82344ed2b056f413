"""The command `rope_jax`: its sub-commands are the programs `python -m rope_jax.MODULE`.

    rope_jax train --config=digits --workdir=runs/digits
    rope_jax evaluate runs/digits --resolutions=8,12

`rope_jax COMMAND --help` lists the settings of a command.
"""

import importlib
import sys

from rope_jax import __version__
from rope_jax.system.streams import keep_going_unread

# Command -> module of `rope_jax.commands`, function that reads `sys.argv`, description.
COMMANDS = {
    "train": ("train", "command", "train a recipe, resume it, and evaluate it"),
    "evaluate": ("evaluate", "main", "accuracy of a model at any resolution"),
    "analyse": ("analyse", "main", "attention, frequencies, correlation, costs"),
    "compare": ("compare", "command", "train several schemes and seeds on these images"),
    "report": ("report", "main", "compare finished runs on one page"),
    "reproduce": ("reproduce", "command", "every table and figure of the four papers"),
    "export": ("export", "main", "write a model as a program that needs only jax"),
    "tune": ("tune", "main", "measure the fastest kernels of a model on this GPU"),
    "data verify": ("verify", "main", "list images that cannot be used"),
    "data prepare": ("prepare", "main", "pack resized images for fast reading"),
    "models": ("models", "main", "list the models"),
    "weights": ("weights", "main", "list the published weights"),
    "positions": ("positions", "main", "list the positional schemes"),
}
_HELP = ("-h", "--help", "help")


def main() -> None:
    """Runs the sub-command that `sys.argv` names, or lists the sub-commands."""
    keep_going_unread()
    words = sys.argv[1:]
    if words[:1] == ["--version"]:
        print(f"rope_jax {__version__}")
        return
    name = next((name for name in COMMANDS if words[: name.count(" ") + 1] == name.split()), None)
    if name is not None:
        module, function, _ = COMMANDS[name]
        sys.argv = [f"rope_jax {name}", *words[name.count(" ") + 1 :]]
        try:
            sys.exit(getattr(importlib.import_module(f"rope_jax.commands.{module}"), function)())
        except KeyboardInterrupt:
            print("rope_jax: stopped by Ctrl-C", file=sys.stderr)
            sys.exit(130)
    group = words[0] if words and words[0] not in _HELP else ""
    inside = {name: entry for name, entry in COMMANDS.items() if name.startswith(f"{group} ")}
    if group and (not inside or words[1:2] not in ([], ["-h"], ["--help"])):
        print(f"rope_jax: {_unknown_command(words, inside or COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    print("usage: rope_jax COMMAND [SETTINGS | --help]\n\ncommands:")
    for name, (_, _, text) in (inside or COMMANDS).items():
        print(f"  {name:<14}{text}")


def _unknown_command(words: list[str], commands: dict) -> str:
    from rope_jax.names.text import closest

    command = " ".join(words[: 1 + (commands is not COMMANDS)])
    return f"{command!r} is not a command; {closest(command, commands)}"


if __name__ == "__main__":
    main()
