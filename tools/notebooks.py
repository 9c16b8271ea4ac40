"""Run the notebooks of examples/ and store what they print: `python tools/notebooks.py [NAME ...]`.

Needs nbclient and ipykernel, and some minutes. Stored are the standard output and pictures; not progress, nor lines
with a temporary folder, which differ from run to run. The site shows them.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def keep(cell: dict[str, Any]) -> None:
    """Leave of a cell's outputs what a reader needs."""
    text, pictures = "", []
    for output in cell["outputs"]:
        if output["output_type"] == "error":
            raise RuntimeError("\n".join(output["traceback"]))
        data = output.get("data", {})
        if output.get("name") == "stdout":
            text += "".join(output["text"])
        elif "image/png" in data:
            picture = {"image/png": data["image/png"], "text/plain": data["text/plain"]}
            pictures.append({"output_type": "display_data", "data": picture, "metadata": {}})
    lines = [line for line in text.splitlines(keepends=True) if tempfile.gettempdir() not in line]
    said = [{"output_type": "stream", "name": "stdout", "text": "".join(lines)}] if lines else []
    cell["outputs"], cell["metadata"] = [*said, *pictures], {}


def main(names: list[str]) -> None:
    """Run the notebooks of these names, or all."""
    import nbformat
    from nbclient import NotebookClient

    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        book = nbformat.read(path, 4)
        metadata = dict(book["metadata"])
        NotebookClient(book, timeout=1800, resources={"metadata": {"path": os.fspath(FOLDER)}}).execute()
        book["metadata"] = metadata
        for cell in book["cells"]:
            if cell["cell_type"] == "code":
                keep(cell)
        nbformat.write(nbformat.from_dict(book), path)
        print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
