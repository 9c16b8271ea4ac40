"""The palette of every figure and the style sheet of a page, which has each colour once for light and once for dark."""

from importlib.resources import files

from .markup import escape

# (light, dark). The variants' six keep a distance of ΔE 14 and more under simulated deuteranopia and protanopia.
VARIANTS = (
    ("#4b515a", "#c4c9d0"),
    ("#c8461a", "#f2794a"),
    ("#2f7fc1", "#63aef0"),
    ("#0f8f6c", "#2fb58c"),
    ("#cf9e17", "#f2cf63"),
    ("#8b3f8f", "#b877c9"),
)
# An ordered ramp for layers, first to last: lightness rises, so it survives grey print and colour blindness.
RAMP = (
    ("#3b1f5e", "#9a88cf"),
    ("#3c4a86", "#6f8cc4"),
    ("#2f7192", "#5fa9c9"),
    ("#27968c", "#55c2b4"),
    ("#5bb26f", "#86d493"),
    ("#a9bf3f", "#cfdf6d"),
)
# Heads have no order: as many hues as keep apart, then the same in other shapes.
HEADS = (*VARIANTS[1:], VARIANTS[0], ("#d0699a", "#f09cc2"), ("#7d5630", "#bd9063"))
INK, MUTED, RULE = ("#211f1b", "#dedad2"), ("#6d675d", "#9c978d"), ("#d9d4c8", "#3a3a3c")
NEGATIVE, POSITIVE = ("#2a6fb5", "#5ba3ea"), ("#c8521f", "#f0824c")
VARIABLES = {
    "ink": INK,
    "muted": MUTED,
    "rule": RULE,
    "negative": NEGATIVE,
    "positive": POSITIVE,
    **{f"variant-{i}": pair for i, pair in enumerate(VARIANTS)},
    **{f"layer-{i}": pair for i, pair in enumerate(RAMP)},
    **{f"head-{i}": pair for i, pair in enumerate(HEADS)},
}


def variant_name(index: int, name: str) -> str:
    """The name of the variant at `index` in a table: HTML, with a dot of its colour."""
    return f'<i class="dot" style="color:var(--variant-{index % len(VARIANTS)})"></i>{escape(name)}'


def layer_variable(index: int, count: int) -> str:
    """The style sheet variable of layer `index` of `count`; with more than six layers, neighbours share a colour."""
    few = 1 < count < len(RAMP)
    return f"layer-{round(index * (len(RAMP) - 2) / (count - 1)) if few else index * len(RAMP) // max(count, 1)}"


def style_sheet() -> str:
    """The style of a page: page.css, and the palette, with dark colours if the reader prefers them."""
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in VARIABLES.items()) for i in (0, 1))
    css = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}{css}"
