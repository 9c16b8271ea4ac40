"""The settings of Sphinx for the site. `make site` (tools/site/build.py) calls it."""

import re
from typing import Any

import reference
import source
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

project = "mnemos"
author = copyright = "the authors of mnemos"
release = version = source.PACKAGE["__version__"].value.strip("'\"")

extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may go from # to ###
smartquotes = False  # D' is a width
highlight_language = "none"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"mnemos {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sphinx = html_show_copyright = html_copy_source = html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": False, "top_of_page_buttons": []}
pygments_style = "default"
pygments_dark_style = "monokai"


class LinkedNames(SphinxTransform):
    """`mnemos.replay(...)` in a text is a link to its entry in the reference: on a page of docs/ the first time."""

    default_priority = 5

    def apply(self, **_: Any) -> None:
        """Wrap the literals that name an entry."""
        in_reference = self.env.docname.startswith("api/")
        targets, linked = reference.targets(), set()
        for node in list(self.document.findall(nodes.literal)):
            match = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", node.astext(), re.DOTALL)
            path = targets.get(match[1]) if match else None
            if path is None or _inside(node, (nodes.reference, nodes.title, addnodes.pending_xref, nodes.term)):
                continue
            # Elsewhere a short name may be another library's, and in the reference that of a parameter.
            short = re.match(r"[A-Z]\w*[a-z]|.*[._]" if in_reference else r"mnemos\.|\w+Config$", match[1])
            if not short or path in linked or self._is_own(node, path):
                continue
            if not in_reference:
                linked.add(path)
            options = {"refdomain": "py", "reftype": "obj", "reftarget": path, "refwarn": True}
            reference_node = addnodes.pending_xref("", refdoc=self.env.docname, refexplicit=True, **options)
            node.replace_self(reference_node)
            reference_node += node

        for node in self.document.findall(addnodes.pending_xref):
            node.attributes.pop("refspecific", None)  # a type of a signature is what its full name says

    def _is_own(self, node: nodes.Node, path: str) -> bool:
        """Whether the text is of the entry itself, or of one of its members."""
        while node.parent is not None:
            node = node.parent
            if isinstance(node, addnodes.desc) and any(
                path in one.get("ids", ()) for one in node.findall(addnodes.desc_signature)
            ):
                return True
        return False


def _inside(node: nodes.Node, kinds: tuple[type, ...]) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, kinds):
            return True
    return False


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_transform(LinkedNames)
