"""Small faults in Python source: where one could be made, and what the line then says.

A fault changes one expression or drops one statement: a sign, an index, a comparison, a condition, a constant, a
`detach`, a reset. Nothing is changed in docstrings, annotations, defaults, decorators, error messages and assertions,
since no behaviour rests on them or their value is a matter of choice.
"""

import ast
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

BINARY: dict[type, tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
}
COMPARED: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
DROPPED_METHODS = ("detach", "flip", "abs", "square", "neg", "sigmoid", "sqrt", "clamp", "clamp_min", "clamp_max")
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Fault:
    """Characters start to stop of a file, what they are replaced by, and the first line before and after."""

    file: str
    line: int
    kind: str
    start: int
    stop: int
    new: str
    before: str
    after: str

    def apply(self, source: str) -> str:
        """The whole source with the fault in it."""
        return source[: self.start] + self.new + source[self.stop :]

    def changes(self, source: str) -> bool:
        """Whether the file with the fault is another program, and one that can be parsed."""
        try:
            return ast.dump(ast.parse(self.apply(source))) != ast.dump(ast.parse(source))
        except SyntaxError:
            return False

    def record(self) -> dict[str, Any]:
        """What a result file says of it."""
        return {k: v for k, v in asdict(self).items() if k not in ("start", "stop", "new")}


def faults(source: str, file: str) -> list[Fault]:
    """Every fault that can be made in a file, in the order of its text; a few of them are no change (`changes`)."""
    found = {(fault.start, fault.stop, fault.new): fault for fault in _Finder(source, file).found()}
    return [found[place] for place in sorted(found)]


class _Finder:
    """Walks a file's tree; offsets are of characters."""

    def __init__(self, source: str, file: str) -> None:
        self.source, self.file, self.tree = source, file, ast.parse(source)
        self.lines = source.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def found(self) -> Iterator[Fault]:
        for node in self._living(self.tree):
            yield from self._of(node)

    def _living(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes on which behaviour rests."""
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
                continue  # `args` of a function are its parameters and their defaults
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST) or isinstance(child, SKIPPED):
                    continue
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    continue  # a docstring
                if isinstance(node, ast.ClassDef | ast.Module) and isinstance(child, ast.Assign | ast.AnnAssign):
                    continue  # a default of a setting, a table of names
                if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                    continue
                yield child
                yield from self._living(child)

    def _of(self, node: ast.AST) -> Iterator[Fault]:
        match node:
            case ast.BinOp(left, op, right) if type(op) in BINARY and not _is_text(left) and not _is_text(right):
                yield self._operator("arithmetic", left, right, *BINARY[type(op)])
            case ast.Compare(left, [op], [right]):
                yield self._operator("comparison", left, right, *COMPARED[type(op)])
            case ast.BoolOp(op, [left, right, *_]):
                old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                if len(node.values) == 2:
                    yield self._operator("condition", left, right, old, new)
            case ast.UnaryOp(ast.Not() | ast.USub(), operand):
                yield self._replaced(
                    "sign" if isinstance(node.op, ast.USub) else "not", node, f"({self._text(operand)})"
                )
            case ast.IfExp(test, body, orelse):
                new = f"({self._text(orelse)} if {self._text(test)} else {self._text(body)})"
                yield self._replaced("branches exchanged", node, new)
            case ast.Constant(bool() as value):
                yield self._replaced("constant", node, str(not value))
            case ast.Constant(int() as value):
                yield self._replaced("constant", node, str(value + 1))
            case ast.Constant(float() as value) if value:
                yield self._replaced("constant", node, repr(2 * value))
            case ast.Call(ast.Attribute(value, name)) if name in DROPPED_METHODS and not _is_module(value):
                yield self._replaced(f"no {name}", node, self._text(value))
            case ast.Expr(ast.Call()):
                yield self._replaced("statement dropped", node, "pass")
            case ast.AugAssign(target, _, _):
                yield self._replaced("statement dropped", node, f"{self._text(target)} = {self._text(target)}")

    def _operator(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> Fault:
        start, stop = self._span(left)[1], self._span(right)[0]
        between = self.source[start:stop]
        return self._fault(kind, start, stop, between.replace(old, new, 1), left)

    def _replaced(self, kind: str, node: ast.AST, new: str) -> Fault:
        return self._fault(kind, *self._span(node), new, node)

    def _fault(self, kind: str, start: int, stop: int, new: str, node: ast.AST) -> Fault:
        line = next(i for i in range(len(self.lines)) if self.starts[i + 1] > start) + 1
        first = self.starts[line - 1]
        before = self.lines[line - 1].strip()
        changed = self.source[:start] + new + self.source[stop:]
        after = changed[first:].splitlines()[0].strip()
        return Fault(self.file, line, kind, start, stop, new, before, after)

    def _span(self, node: Any) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """Of a character; the tree counts bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def _text(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.source, node) or ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "np", "math", "nn")
