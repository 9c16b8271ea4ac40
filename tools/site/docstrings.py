"""Docstrings as Markdown. They are plain text with `code`, indented equations, lists, and lines `name: what it is`."""

import inspect
import re

_CODE = re.compile(r"(`[^`]*`)")


def escape(text: str) -> str:
    """Text in which Markdown finds nothing but `code`."""
    parts = _CODE.split(text)
    parts[::2] = [re.sub(r"([\\*<|~\[\]])|(?<!\w)_|_(?!\w)", lambda m: "\\" + m[0], part) for part in parts[::2]]
    return "".join(parts)


def markdown(documentation: str, known: set[str]) -> str:
    """A docstring as Markdown. known: the names of parameters and fields; each that is explained begins an item."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(documentation))
    merged: list[str] = []
    for block in blocks:  # equations with an empty line between them are one block
        if merged and block.startswith("    ") and merged[-1].startswith("    "):
            merged[-1] += f"\n\n{block}"
        else:
            merged.append(block)
    return "\n\n".join(_block(block, known) for block in merged if block.strip())


def _block(block: str, known: set[str]) -> str:
    if block.startswith("    "):
        return f"```text\n{inspect.cleandoc(block)}\n```"
    first, _, rest = block.partition("\n")
    if first == "Attributes:":
        items = re.split(r"\n(?=\w)", inspect.cleandoc(rest))
        return "\n\n".join(_item(name, "", said) for name, _, said in (item.partition(":") for item in items))
    if _is_list(block):
        items = re.split(r"\n(?=- |\d+\. )", block)
        return "\n".join(re.sub(r"^(- |\d+\. )(.*)", lambda m: m[1] + escape(m[2]), " ".join(i.split())) for i in items)
    lines = block.splitlines()
    for number, line in enumerate(lines):  # an equation or a list right below a line
        if line.startswith("    ") or (number and _is_list("\n".join(lines[number:]))):
            before, after = "\n".join(lines[:number]), "\n".join(lines[number:])
            return "\n\n".join(filter(None, [_paragraph(before, known), _rest(after, known)]))
    return _paragraph(block, known)


def _is_list(text: str) -> bool:
    """Whether a text begins a list. A line may begin with a number by chance, but a 2 follows the 1 of a list."""
    return text.startswith("- ") or (text.startswith("1. ") and "\n2. " in text)


def _rest(text: str, known: set[str]) -> str:
    """Lines that begin with an indented block, perhaps with a paragraph below it."""
    if not text.startswith("    "):
        return _block(text, known)
    lines = text.splitlines()
    end = next((n for n, line in enumerate(lines) if not line.startswith("    ")), len(lines))
    return "\n\n".join(filter(None, [_block("\n".join(lines[:end]), known), _rest_of(lines[end:], known)]))


def _rest_of(lines: list[str], known: set[str]) -> str:
    return _block("\n".join(lines), known) if lines else ""


_NAME = r"\*{0,2}[A-Za-z_]\w*"
_NAMES = rf"{_NAME}(?:(?:, | and ){_NAME})*"
# At the start of a sentence: `name:`, `name(x) -> y:`, `name=1:`, `name [shape] of such a kind:`, or `name [shape]`.
_SHAPE = r" \[[^\]]*\][^:.\[]{0,40}| or None|\([^()]*\)(?: -> [^:]{1,20})?|=[^\s:]{1,12}|"
_START = re.compile(rf"(?:^|(?<=[.;:)»\"] ))(?P<names>{_NAMES})(?:(?P<shape>{_SHAPE}): |(?= \[))")
_CHAIN = re.compile(rf" \[[^\]]*\](?:,| and) (?:{_NAME}, )*{_NAME} \[")
_AFTER = re.compile(r"(?<=[.)]) (?=(?:Raises|Returns|Costs?:?|Memory:|Gradients?) )|(?<=[.]) (?=-> )")


def _paragraph(text: str, known: set[str]) -> str:
    """A paragraph; from its first `name: what it is` on, the items, and what is raised, returned or costs after."""
    text = " ".join(text.split())
    found = [m for m in _START.finditer(text) if _named(m) <= known | {"y"} and _named(m) & known]
    bounds = [*(m.start() for m in found), len(text)]
    lines = [_escape_start(escape(text[: bounds[0]].strip()))]
    for match, end in zip(found, bounds[1:], strict=True):
        said = text[match.end() : end].strip()
        chain = match["shape"] is None and _CHAIN.match(f" {said}")  # q, k [B, T, H, D], v [B, T, H, M]
        said, *after = _AFTER.split(text[match.start() : end].strip() if chain else said, maxsplit=1)
        lines.append(
            _escape_start(escape(said))
            if chain
            else _item(match["names"], match["shape"] or "", said.removesuffix(";"))
        )
        lines += [_escape_start(escape(sentence)) for sentence in after]
    return "\n\n".join(line for line in lines if line)


def _named(match: re.Match[str]) -> set[str]:
    return set(re.findall(r"\w+", match["names"].replace(" and ", " ")))


def _item(names: str, shape: str, said: str) -> str:
    if shape.startswith(("(", "=")):
        names, shape = f"`{names}{shape}`", ""
    else:
        names = re.sub(r"\*{0,2}\w+", lambda m: f"`{m[0]}`" if m[0] != "and" else "and", names)
    return f"{names}{escape(shape)}\n: {_escape_start(escape(' '.join(said.split())))}"


def _escape_start(text: str) -> str:
    """What would begin a list, a heading or a quotation in Markdown."""
    return re.sub(r"^([-+#>]|\d+(?=[.)] ))", lambda m: f"{m[1]}\\" if m[1].isdigit() else f"\\{m[1]}", text)
