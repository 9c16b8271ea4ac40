"""Build the site into build/site: `python tools/site/build.py`. Warnings, such as a broken link, are errors.

The pages come from README, docs/, the operators' README, log/, examples/notebooks and the docstrings. What
is written needs no network. Search reads an index by script, so look at it through a server:

    python -m http.server --directory build/site
"""

import importlib.util
import shutil
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"


def main() -> int:
    """Build, or print what the extra `docs` needs; 0, or 1 where a page is wrong, or 2 where Sphinx is missing."""
    if sys.argv[1:] == ["--requirements"]:
        print(*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"])
        return 0
    needed = ("sphinx", "myst_parser", "furo", "sphinx_copybutton")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(f"expected the extra docs, found no {missing[0]}; run: pip install '.[docs]'", file=sys.stderr)
        return 2
    from sphinx.cmd.build import build_main

    sys.path[:0] = [str(HERE), str(ROOT / "src")]
    import pages

    for folder in (SOURCE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    pages.write(SOURCE)
    wrong = build_main(["-b", "html", "-c", str(HERE), "-W", "--keep-going", "-q", str(SOURCE), str(SITE)])
    if not wrong:
        shutil.rmtree(SITE / ".doctrees", ignore_errors=True)
        print(f"{SITE.relative_to(ROOT)}/index.html: {len(list(SITE.rglob('*.html')))} pages")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
