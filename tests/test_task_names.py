"""What trains, evaluates and reports knows no task by name: neither its kind, nor its metrics, nor its class."""

import ast
from pathlib import Path

from mnemos import registry
from mnemos.lab.tasks import metrics
from mnemos.lab.tasks.metrics import Metric

SOURCE = Path(__file__).parents[1] / "src" / "mnemos"
ROOMS = ("run", "compare", "evaluate", "report")
FILES = sorted(path for room in ROOMS for path in (SOURCE / "lab" / room).rglob("*.py"))
# The loss is no task's own: the trainer reports it of all.
METRICS = {m.name for m in vars(metrics).values() if isinstance(m, Metric)} - {"loss"}
KINDS = {"classification", "language", "transcription"}
assert len(FILES) > 50, "the rooms are elsewhere"
CLASSES = {
    "ArrayTask",
    "GeneratedTask",
    "ImageTask",
    "PixelTask",
    "SpokenTask",
    "TextTask",
    "TokenTask",
    "TranslationTask",
}


def docstrings(tree: ast.AST) -> set[int]:
    """The constants that are docstrings, by identity."""
    found = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            found.add(id(body[0].value))
    return found


def test_no_task_is_known_by_name():
    found = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        left_out = docstrings(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
                name = node.value if node.value in METRICS | KINDS else None
            elif isinstance(node, (ast.Name, ast.alias)):
                name = node.id if isinstance(node, ast.Name) else node.name
                name = name if name in CLASSES else None
            else:
                continue
            if name is not None:
                found.append(f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)} names {name!r}")
    assert not found


def test_the_names_are_those_that_there_are():
    assert {"accuracy", "token error rate", "bits", "perplexity", "top5"} <= METRICS
    assert len(registry.names("data")) > 5
