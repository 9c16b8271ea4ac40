"""The package's source files as trees: several tests read all of them, and to parse them takes seconds."""

import ast
import functools
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "mnemos"


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a file, as `ast.walk` gives them: the module first."""
    return list(ast.walk(ast.parse(path.read_text())))
