"""Write the map of the package's files into docs/architecture.md: `python tools/file_map.py [--check]`.

Each file has one line, the first line of its docstring; each folder has that of its `__init__.py`. The map is between
`<!--files-->` and `<!--/files-->`. `--check` writes nothing and fails where the map is out of date.
"""

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "mnemos"
PAGE = ROOT / "docs" / "architecture.md"
MAP = re.compile(r"(?<=<!--files-->\n).*?(?=<!--/files-->)", re.DOTALL)


def about(path: Path) -> str:
    """The first line of a file's docstring, without the full stop at its end. Raises ValueError where there is none."""
    documentation = ast.get_docstring(ast.parse(path.read_text()))
    if not documentation:
        raise ValueError(f"{path}: expected a docstring, found none; say in one line what the file is for")
    return documentation.splitlines()[0].removesuffix(".")


def file_map(package: Path = PACKAGE) -> str:
    """The package's files, folder by folder, as a Markdown list; files that only start a program are left out."""
    lines = []
    for folder in [package, *sorted(path for path in package.rglob("*") if path.is_dir())]:
        files = sorted(path for path in folder.glob("*.py") if path.name not in ("__init__.py", "__main__.py"))
        if not files and not (folder / "__init__.py").exists():
            continue
        name = folder.relative_to(package.parent)
        said = f": {about(folder / '__init__.py')}" if (folder / "__init__.py").exists() else ""
        lines += [f"\n**`{name}/`**{said}\n", *(f"- `{path.name}`: {about(path)}" for path in files)]
    return "\n".join(lines).lstrip() + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write the map, or with `--check` compare it; 1 where it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the map is out of date")
    check = parser.parse_args(argv).check
    before = PAGE.read_text()
    after = MAP.sub(lambda _: file_map(), before)
    if check and after != before:
        print(f"{PAGE.relative_to(ROOT)}: the map of files is out of date; `make numbers` writes it", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
