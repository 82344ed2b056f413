"""Executes the notebooks and stores their outputs: `python -m docs.make_notebooks`.

`make notebooks` does the same. A notebook is executed if its code differs from that of its stored
outputs (--all: every notebook), in a new folder, on the CPU. The cells SHARED are those of the
first notebook in all of them. A test compares both with what is stored.
"""

import hashlib
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
FIRST, *OTHERS = NOTEBOOKS = [
    ROOT / "colabs" / f"{name}.ipynb"
    for name in (
        "quickstart",
        "train_on_your_folder",
        "positional_schemes",
        "load_weights",
        "fused_kernels",
    )
]
SHARED = ("on-colab", "install")  # ids of cells
CHECKSUM = "executed"  # key in the metadata of a notebook
Notebook = dict[str, Any]


def read(path: pathlib.Path) -> Notebook:
    """Reads a notebook; the source of each cell is one text."""
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def write(path: pathlib.Path, notebook: Notebook) -> None:
    """Writes a notebook, with one line of text for each line of source, as Jupyter does."""
    cells = [
        cell | {"source": cell["source"].splitlines(keepends=True)} for cell in notebook["cells"]
    ]
    text = json.dumps(notebook | {"cells": cells}, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n")


def code(notebook: Notebook) -> list[Notebook]:
    """The cells with code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def checksum(notebook: Notebook) -> str:
    """SHA-256 of the code that is executed."""
    sources = [cell["source"] for cell in code(notebook) if cell["id"] not in SHARED]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def up_to_date(notebook: Notebook) -> bool:
    """Whether the stored outputs are those of the notebook's code."""
    return notebook["metadata"].get(CHECKSUM) == checksum(notebook)


def share(notebook: Notebook, first: Notebook) -> Notebook:
    """The notebook with the shared cells of the first one."""
    shared = {cell["id"]: cell for cell in first["cells"] if cell["id"] in SHARED}
    return notebook | {"cells": [shared.get(cell["id"], cell) for cell in notebook["cells"]]}


def execute(notebook: Notebook) -> Notebook:
    """Executes a notebook, and returns it with its outputs and their checksum."""
    import nbclient
    import nbformat

    os.environ["JAX_PLATFORMS"] = "cpu"
    # "!python" in a cell is this interpreter.
    os.environ["PATH"] = os.pathsep.join(
        [str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]
    )
    with tempfile.TemporaryDirectory() as folder:
        node = nbformat.from_dict(notebook)
        nbclient.NotebookClient(
            node, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}
        ).execute()
        done = json.loads(nbformat.writes(node).replace(folder, "."))
    for cell in done["cells"]:
        cell["source"] = "".join(cell["source"])
        cell["metadata"].pop("execution", None)  # times
        if cell["cell_type"] == "code":
            cell["outputs"] = cleaned(cell["outputs"])
    metadata = notebook["metadata"] | {CHECKSUM: checksum(done)}
    return notebook | {"cells": done["cells"], "metadata": metadata}


def cleaned(outputs: Sequence[Notebook]) -> list[Notebook]:
    """The outputs of a cell as a terminal shows them, with the text of a stream in one piece."""
    merged: list[Notebook] = []
    for output in outputs:
        if output["output_type"] != "stream":
            merged.append(output)
            continue
        before = merged.pop() if merged and merged[-1].get("name") == output["name"] else None
        text = "".join([*(before or {"text": ""})["text"], *output["text"]])
        merged.append(output | {"text": text})
    for output in merged:
        if output["output_type"] == "stream":
            output["text"] = shown(output["text"]).splitlines(keepends=True)
    return merged


def shown(text: str) -> str:
    """A text without what was overwritten or only controls a terminal.

    >>> shown("1 of 2\\r2 of 2\\r\\n\\x1b[1mdone\\x1b[0m")
    '2 of 2\\ndone'
    """
    lines = text.replace("\r\n", "\n").split("\n")
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", "\n".join(lines))


def main(argv: Sequence[str]) -> None:
    """Copies the shared cells, and executes what is not up to date."""
    first = read(FIRST)
    for path in NOTEBOOKS:
        notebook = share(read(path), first)
        if "--all" in argv or not up_to_date(notebook):
            print(f"executing {path.name}", flush=True)
            notebook = execute(notebook)
        write(path, notebook)


if __name__ == "__main__":
    main(sys.argv[1:])
