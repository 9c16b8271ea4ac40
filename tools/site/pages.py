"""The pages of the site as files for Sphinx: README, docs/, operators, findings, notebooks, API reference.

The pages of the repository stay as they are. Here their relative links become links between pages of the site, and
files that are no pages (results, scripts) come along for download.
"""

import base64
import json
import os
import re
import shutil
from pathlib import Path

import reference
import source
from source import ROOT

from mnemos.lab.cli.verbs import usage

# The sections of the site, in order: page of docs/ (or its place on the site), and a short name where its title is
# long. A page of docs/ that is named in none is put at the end of OTHERS.
OTHERS = "Guides"
SECTIONS: dict[str, dict[str, str]] = {
    "Start": {"install": "", "first-hour": "", "choosing": ""},
    OTHERS: {
        "fast": "Fast on a CPU",
        "replay": "Long sequences",
        "streams": "Streams",
        "linearise": "Linearise a decoder",
        "cache": "Add a gated cache",
        "pretrained": "A trained decoder",
        "memory-tokens": "Memory tokens",
        "compare": "Compare memories",
        "text": "Your texts",
        "images": "Your pictures",
        "trainers": "Trainer and Lightning",
        "export": "Export",
        "look": "Look into a memory",
        "own-memory": "A memory of your own",
        "testing": "Laws of a memory",
        "machines": "Several devices",
        "translation": "Translation",
        "detection": "Detection",
    },
    "Concepts": {
        "state": "A state is a value",
        "linear-attention": "Linear attention",
        "gated-cache": "The gated cache",
        "memformer": "Memformer and replay",
        "forget-correct": "Forget and correct",
        "reading-comparisons": "Reading a comparison",
    },
    "Results": {
        "results": "",
        "speed": "",
        "memories": "",
        "linearised": "Linearised decoders",
        "claims": "",
        "cached-transformers": "Cached Transformers",
        "linear-transformers": "Transformers are RNNs",
        "memformer-paper": "Memformer",
        "findings/index": "Findings",
    },
    "Reference": {
        "api/index": "",
        "command-line": "",
        "hugging-face": "",
        "hosts": "",
        "run-folder": "",
        "datasets": "",
        "operators/index": "",
        "glossary": "",
    },
    "Project": {"reliability": "", "architecture": "", "policy": "", "contributing": "", "changelog": ""},
}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCED = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def places() -> dict[Path, str]:
    """The files of the repository that are pages, and where on the site each is, without its ending."""
    found = {ROOT / "README.md": "index", ROOT / "CONTRIBUTING.md": "contributing", ROOT / "CHANGELOG.md": "changelog"}
    found |= {path: "pages" if path.stem == "README" else path.stem for path in (ROOT / "docs").glob("*.md")}
    found |= {path: f"operators/{path.parent.name}" for path in (ROOT / "src/mnemos/ops").glob("*/README.md")}
    found |= {path: f"findings/{path.stem}" for path in (ROOT / "log").glob("*.md")}
    found |= {path: f"notebooks/{path.stem}" for path in (ROOT / "examples/notebooks").glob("*.ipynb")}
    found |= {path: f"examples/{path.parent.name}" for path in (ROOT / "examples").glob("*/README.md")}
    found[ROOT / "log" / "README.md"] = "findings/index"
    return found


def sections() -> dict[str, dict[str, str]]:
    """The sections with the pages that there are: those of docs/ that no section names too."""
    pages = set(places().values()) | {"operators/index", "api/index", "command-line"}
    found = {title: {p: label for p, label in named.items() if p in pages} for title, named in SECTIONS.items()}
    named = {page for one in SECTIONS.values() for page in one}
    found["Start"] |= {page: "" for page in sorted(pages) if page.startswith("notebooks/")}
    found[OTHERS] |= {page: "" for page in sorted(pages - named - {"index", "pages"}) if "/" not in page}
    return found


def write(folder: Path) -> None:
    """Write all pages, and the files that they link, into an empty folder."""
    site = Site(folder)
    for path, place in places().items():
        text = site.notebook(path) if path.suffix == ".ipynb" else path.read_text()
        text = site.with_links(text, path, place)
        if place == "index":
            text += "\n".join(_toctree(title, named) for title, named in sections().items())
        elif place == "findings/index":
            pass
        elif place.startswith(("findings/", "examples/")) or place == "pages":
            text = f"---\norphan: true\n---\n\n{text}"  # other pages link them
        site.add(place, text)
    site.add("operators/index", _list("Operators", "The equations, costs and limits of each operator.", "operators"))
    site.add("api/index", reference.index())
    for name in reference.PAGES:
        site.add(f"api/{name}", reference.page(name))
    site.add("command-line", command_line())


class Site:
    """The folder that Sphinx reads."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.places = folder, places()

    def add(self, place: str, text: str) -> None:
        """A page."""
        path = self.folder / f"{place}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def with_links(self, text: str, path: Path, place: str) -> str:
        """The text of a page of the repository with the links of its place on the site."""
        parts = FENCED.split(text)
        parts[::2] = [LINK.sub(lambda m: m[1] + self._link(m[2], path, place) + m[3], part) for part in parts[::2]]
        # a link around `code` is cut by the split above
        return re.sub(r"(`\]\()([^)\s]+)(\))", lambda m: m[1] + self._link(m[2], path, place) + m[3], "".join(parts))

    def notebook(self, path: Path) -> str:
        """A notebook as a page: its texts, its code with what it printed and drew, and itself for download."""
        parts = []
        for number, cell in enumerate(json.loads(path.read_text())["cells"]):
            text = "".join(cell["source"])
            parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
            said = ""
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                if "image/png" in data:
                    picture = self.folder / "notebooks" / f"{path.stem}-{number}.png"
                    picture.parent.mkdir(parents=True, exist_ok=True)
                    picture.write_bytes(base64.b64decode(data["image/png"]))
                    said += f"```\n\n![What the cell draws]({picture.name})\n\n```text\n"
                else:
                    said += "".join(output.get("text", data.get("text/plain", "")))
            parts.append(re.sub(r"```text\n+```", "", f"```text\n{said.rstrip()}\n```"))
        title, _, rest = "\n\n".join(parts).partition("\n")
        return f"{title}\n\nA notebook of Jupyter: [{path.name}](../{self._copy(path)}).\n{rest}\n"

    def _link(self, target: str, path: Path, place: str) -> str:
        name, anchor = re.match(r"([^#]*)(#.*)?$", target).groups("")
        if not name or re.match(r"[a-z]+:", name) or (self.folder / Path(place).parent / name).exists():
            return target
        file = Path(os.path.normpath(path.parent / name))
        if file in self.places:
            found = f"{self.places[file]}.md"
        elif file.is_dir() and (file / "README.md") in self.places:
            found = f"{self.places[file / 'README.md']}.md"
        elif file.is_dir():
            found = self._listing(file)
        elif file.exists():
            found = self._copy(file)
        else:
            return target  # Sphinx says that it is broken
        return os.path.relpath(found, Path(place).parent) + anchor

    def _copy(self, file: Path) -> str:
        found = Path("files") / file.relative_to(ROOT)
        (self.folder / found).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, self.folder / found)
        return str(found)

    def _listing(self, folder: Path) -> str:
        """A page that lists the files of a folder, for download."""
        place = f"files/{folder.relative_to(ROOT)}/index"
        rows = []
        for file in sorted(folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                name = str(file.relative_to(folder))
                if file in self.places:
                    rows.append(f"- [{name}]({os.path.relpath(self.places[file], Path(place).parent)}.md)")
                else:
                    rows.append(f"- [{name}]({os.path.relpath(self._copy(file), Path(place).parent)})")
        self.add(place, f"---\norphan: true\n---\n\n# Files: {folder.relative_to(ROOT)}\n\n" + "\n".join(rows) + "\n")
        return f"{place}.md"


def _toctree(title: str, named: dict[str, str]) -> str:
    rows = [f"{label} <{page}>" if label else page for page, label in named.items()]
    return f"\n```{{toctree}}\n:caption: {title}\n:hidden:\n:maxdepth: 2\n\n" + "\n".join(rows) + "\n```\n"


def _list(title: str, said: str, folder: str) -> str:
    rows = sorted(Path(place).name for place in places().values() if place.startswith(f"{folder}/"))
    return f"# {title}\n\n{said}\n\n```{{toctree}}\n:maxdepth: 1\n\n" + "\n".join(rows) + "\n```\n"


def command_line() -> str:
    """The page of the commands: what `mnemos --help` prints, and the exit codes."""
    verbs = source.PACKAGE["lab.cli.verbs"]
    codes = "Exit codes: " + verbs.docstring.value.split("\n\n")[1]
    about = "`mnemos --help` prints this, and `mnemos COMMAND --help` more."
    return f"# Command line\n\n{about}\n\n```text\n{usage()}```\n\n{codes}\n"
