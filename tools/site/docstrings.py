"""Docstrings as reStructuredText. They are text with `code`, indented equations, lists, and `name: what it is`."""

import inspect
import re
import textwrap

_CODE = re.compile(r"(`[^`]*`)")


def escape(text: str) -> str:
    """Text in which reStructuredText finds nothing but `code`."""
    parts = _CODE.split(text)
    parts[::2] = [re.sub(r"[\\*|`]|_(?!\w)|(?<!\w)_", lambda m: "\\" + m[0], part) for part in parts[::2]]
    parts[1::2] = [f"\\ `{part}`\\ " for part in parts[1::2]]  # a letter may follow, as in `x`s
    return re.sub(r"^\\ |(?<=[\s(\[])\\ |\\ (?=[\s.,:;)\]]|$)", "", "".join(parts))


def indented(text: str) -> str:
    """The content of a directive, or of a definition."""
    return textwrap.indent(text, "   ")


def text_of(documentation: str, known: set[str]) -> str:
    """A docstring. known: the names of parameters and fields; each that is explained begins an item."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(documentation))
    merged: list[str] = []
    for block in blocks:  # equations with an empty line between them are one block
        if merged and block.startswith("    ") and merged[-1].startswith("    "):
            merged[-1] += f"\n\n{block}"
        else:
            merged.append(block)
    return "\n\n".join(_block(block, known) for block in merged if block.strip())


def _block(block: str, known: set[str]) -> str:
    if block.startswith("Attributes:\n"):
        items = re.split(r"\n(?=\w)", inspect.cleandoc(block.partition("\n")[2]))
        return "\n\n".join(_item(name, "", said) for name, _, said in (item.partition(":") for item in items))
    lines, parts = block.splitlines(), []
    while lines:  # an equation or a list may stand right below a line
        form = _form(lines)
        others = (n for n in range(1, len(lines)) if form != "list" and _form(lines[n:]) != form)
        end = next(others, len(lines))
        text, lines = "\n".join(lines[:end]), lines[end:]
        if form == "equation":
            parts.append("::\n\n" + indented(textwrap.dedent(text)))
        elif form == "list":
            items = (" ".join(item.split()) for item in re.split(r"\n(?=- |\d+\. )", text))
            parts.append("\n".join(re.sub(r"^(- |\d+\. )(.*)", lambda m: m[1] + escape(m[2]), one) for one in items))
        else:
            parts.append(_paragraph(text, known))
    return "\n\n".join(parts)


def _form(lines: list[str]) -> str:
    """What lines begin with. One may begin with a number by chance, but a 2 follows the 1 of a list."""
    if lines[0].startswith("    ") or not lines[0]:
        return "equation"
    numbered = lines[0].startswith("1. ") and any(line.startswith("2. ") for line in lines)
    return "list" if lines[0].startswith("- ") or numbered else "text"


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
    return f"{escape(names + shape)}\n{indented(_escape_start(escape(' '.join(said.split()))))}"


def _escape_start(text: str) -> str:
    """What would begin a list, a heading or a quotation ."""
    return re.sub(r"^([-+•>]|\w+(?=[.)] )|\.\.|::)", r"\\\1", text)
