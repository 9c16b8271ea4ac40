"""The package's source files, and what they import: to parse the whole of them takes seconds."""

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "mnemos"
STATEMENT = re.compile(r"^[ \t]*((?:from [\w.]+ )?import (?:\([^)]*\)|.*))", re.MULTILINE)


def imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The import statements of a file, at its top and inside functions."""
    text = path.read_text()
    try:
        tree = ast.parse("\n".join(STATEMENT.findall(text)))
    except SyntaxError:  # a sentence that begins as a statement does
        tree = ast.parse(text)
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
