"""The pages of the site as files for Sphinx: README, docs/, operators, findings, notebooks, API reference.

The pages of the repository stay as they are. Here their relative links become links between pages of the site, and
files that are no pages (results, scripts) come along for download.
"""

import base64
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import reference
from reference import ROOT

from mnemos.lab.cli import verbs

NAMED_LINK = r"\[([^\]]*)\]\(([^)#\s]+)\)"
LINK = re.compile(r"(^```.*?^```$|`[^`\n]+`)|\]\(([^)\s]+)\)", re.MULTILINE | re.DOTALL)  # or code, which has none


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
    """The sections of docs/README.md, with the pages that each links and their short names; what is made here beside.

    A page that it does not link is put at the end of the guides.
    """
    pages, found = places(), dict[str, dict[str, str]]()
    for part in re.split(r"^(?=\*\*)", (ROOT / "docs" / "README.md").read_text(), flags=re.MULTILINE)[1:]:
        links = ((name, Path(os.path.normpath(ROOT / "docs" / to))) for name, to in re.findall(NAMED_LINK, part))
        found[part.split("**")[1]] = {pages[path]: " ".join(name.split()) for name, path in links if path in pages}
    found["Reference"] |= {"api/index": "", "operators/index": "", "command-line": ""}
    named = {page for section in found.values() for page in section}
    found["Guides"] |= {
        page: "" for page in pages.values() if "/" not in page and page not in named | {"index", "pages"}
    }
    # What stands in a sentence is no title: there the page's own serves.
    return {title: {p: n if n[:1].isupper() else "" for p, n in section.items()} for title, section in found.items()}


def write(folder: Path) -> None:
    """Write all pages, and the files that they link, into an empty folder."""
    site = Site(folder)
    for path, place in places().items():
        text = site.notebook(path) if path.suffix == ".ipynb" else path.read_text()
        text = site.with_links(text, path, place)
        if place == "index":
            for title, named in sections().items():
                rows = (f"{label} <{page}>" if label else page for page, label in named.items())
                text += _toctree(rows, f"caption: {title}", "hidden:", "maxdepth: 2")
        elif place == "findings/index":
            pass
        elif place.startswith(("findings/", "examples/")) or place == "pages":
            text = f"---\norphan: true\n---\n\n{text}"  # other pages link them
        site.add(place, text)
    operators = sorted(place.partition("/")[2] for place in places().values() if place.startswith("operators/"))
    said = "# Operators\n\nThe equations, costs and limits of each operator.\n"
    site.add("operators/index", said + _toctree(operators, "maxdepth: 1"))
    site.add("api/index", reference.index(), ".rst")
    for name in reference.PAGES:
        site.add(f"api/{name}", reference.page(name), ".rst")
    site.add("command-line", command_line())


class Site:
    """The folder that Sphinx reads."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.places = folder, places()

    def add(self, place: str, text: str, ending: str = ".md") -> None:
        """A page."""
        path = self.folder / f"{place}{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def with_links(self, text: str, path: Path, place: str) -> str:
        """The text of a page of the repository with the links of its place on the site."""
        return LINK.sub(lambda m: m[0] if m[1] else f"]({self._link(m[2], path, place)})", text)

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


def _toctree(pages: Iterable[str], *options: str) -> str:
    return "\n".join(["\n```{toctree}", *(f":{one}" for one in options), "", *pages, "```\n"])


def command_line() -> str:
    """The page of the commands: what `mnemos --help` prints, and the exit codes."""
    codes = f"Exit codes: {(verbs.__doc__ or '').split(chr(10) * 2)[1]}"
    about = "`mnemos --help` prints this, and `mnemos COMMAND --help` more."
    return f"# Command line\n\n{about}\n\n```text\n{verbs.usage()}```\n\n{codes}\n"
