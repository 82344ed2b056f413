"""Executes the notebooks whose code has changed, and stores their outputs: `make notebooks`.

`python -m docs.make_notebooks FILE...` executes these files in any case, each in a new folder. A
notebook stores the checksum of the code that was executed; a test compares it with the code.
"""

import hashlib
import json
import pathlib
import sys
import tempfile
from typing import Any

COLABS = sorted((pathlib.Path(__file__).parents[1] / "colabs").glob("*.ipynb"))
CHECKSUM = "executed"  # key in the metadata of a notebook


def checksum(notebook: dict[str, Any]) -> str:
    """SHA-256 of the code in a notebook."""
    code = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(["".join(source) for source in code]).encode()).hexdigest()


def up_to_date(path: pathlib.Path) -> bool:
    """Checks whether the stored outputs are those of the notebook's code."""
    notebook = json.loads(path.read_text())
    return notebook["metadata"].get(CHECKSUM) == checksum(notebook)


def execute(path: pathlib.Path) -> None:
    """Executes a notebook, and writes it with its outputs."""
    import nbclient  # of the environment of `make docs`
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        options = {"timeout": 600, "coalesce_streams": True, "record_timing": False}
        nbclient.NotebookClient(notebook, resources=resources, **options).execute()
    notebook.metadata[CHECKSUM] = checksum(notebook)
    text = nbformat.writes(notebook).replace(folder, ".").replace(r"\r\n", r"\n")
    path.write_text(text + "\n")


if __name__ == "__main__":
    for path in sys.argv[1:] or [path for path in COLABS if not up_to_date(path)]:
        print(f"executing {path}", flush=True)
        execute(pathlib.Path(path))
