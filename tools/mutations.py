"""Small faults in Python source: where one could be made, and what the line then says.

A fault changes one expression or drops one statement: a sign, an index, a comparison, a condition, a constant, a
`detach`, a reset. Nothing is changed in docstrings, annotations, defaults, decorators, error messages and assertions,
since no behaviour rests on them or their value is a matter of choice.
"""

import ast
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
DROPPED_METHODS = ("detach", "flip", "abs", "square", "neg", "sigmoid", "sqrt", "clamp", "clamp_min", "clamp_max")
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


class Fault(NamedTuple):
    """Characters start to stop of a file, what they are replaced by, and the first line before and after."""

    start: int
    stop: int
    new: str
    file: str
    line: int
    kind: str
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
        return {name: getattr(self, name) for name in ("file", "line", "kind", "before", "after")}


def faults(source: str, file: str) -> list[Fault]:
    """Every fault that can be made in a file, in the order of its text; a few of them are no change (`changes`)."""
    lines = source.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        """Of a character; the tree counts lines from 1, and bytes."""
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    every = []
    for node in _living(ast.parse(source)):
        for kind, new in _changed(node):
            start, stop = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
            text = ast.unparse(new)
            text = f"({text})" if isinstance(new, ast.expr) and not isinstance(new, ast.Constant) else text
            after = (source[:start] + text + source[stop:]).splitlines()[node.lineno - 1].strip()
            every.append(Fault(start, stop, text, file, node.lineno, kind, lines[node.lineno - 1].strip(), after))
    return sorted(every)


def _living(node: ast.AST) -> Iterator[Any]:
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
            yield from _living(child)


def _changed(node: Any) -> Iterator[tuple[str, ast.AST]]:
    """What a node becomes, with the kind of each fault."""

    def with_fields(**fields: Any) -> ast.AST:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS and not _is_text(left) and not _is_text(right):
            yield "arithmetic", with_fields(op=OPERATORS[type(op)]())
        case ast.Compare(_, [op], _):
            yield "comparison", with_fields(ops=[OPERATORS[type(op)]()])
        case ast.BoolOp(op, [_, _]):
            yield "condition", with_fields(op=OPERATORS[type(op)]())
        case ast.UnaryOp(ast.Not(), operand):
            yield "not", operand
        case ast.UnaryOp(ast.USub(), operand):
            yield "sign", operand
        case ast.IfExp(_, body, orelse):
            yield "branches exchanged", with_fields(body=orelse, orelse=body)
        case ast.Constant(bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(int() as value):
            yield "constant", ast.Constant(value + 1)
        case ast.Constant(float() as value) if value:
            yield "constant", ast.Constant(2 * value)
        case ast.Call(ast.Attribute(value, name)) if name in DROPPED_METHODS and not _is_module(value):
            yield f"no {name}", value
        case ast.Expr(ast.Call()):
            yield "statement dropped", ast.Pass()
        case ast.AugAssign(target):
            yield "statement dropped", ast.Assign([target], target, lineno=node.lineno)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "np", "math", "nn")
