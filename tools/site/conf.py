"""The settings of Sphinx for the site. `make site` (tools/site/build.py) calls it."""

import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import reference
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform

import mnemos

project = "mnemos"
author = copyright = "the authors of mnemos"
release = version = mnemos.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
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


SIGNATURE = addnodes.desc_signature
UNLINKED = nodes.reference, nodes.title, addnodes.pending_xref, nodes.term


@functools.cache
def _targets(env: BuildEnvironment) -> dict[str, str]:
    """What text may call an entry or a member: its paths, and its name, of a member with its class's, if it is one."""
    paths, names = {}, defaultdict(set)
    for path, entry in env.domains.python_domain.objects.items():
        parts = 2 if entry.objtype in ("method", "property") else 1
        names[".".join(path.split(".")[-parts:])].add(entry.node_id)
        paths[path] = entry.node_id
    return {name: min(ids) for name, ids in names.items() if len(ids) == 1} | paths


class LinkedNames(SphinxPostTransform):
    """`mnemos.replay(...)` in a text is a link to its entry in the reference: on a page of docs/ the first time."""

    default_priority = 5

    def run(self, **_: Any) -> None:
        """Wrap the literals that name an entry."""
        in_reference = self.env.docname.startswith("api/")
        targets, linked = _targets(self.env), set()
        for node in list(self.document.findall(nodes.literal)):
            match = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", node.astext(), re.DOTALL)
            name = match[1] if match else ""
            path = targets.get(name) or (name.startswith("mnemos.") and targets.get(name.rpartition(".")[2]))
            around = list(_around(node))
            if not path or any(isinstance(one, UNLINKED) for one in around):
                continue
            # Elsewhere a short name may be another library's, and in the reference that of a parameter.
            short = re.match(r"[A-Z]\w*[a-z]|.*[._]" if in_reference else r"mnemos\.|\w+Config$", name)
            own = (
                sign.get("ids", ())
                for one in around
                if isinstance(one, addnodes.desc)
                for sign in one.findall(SIGNATURE)
            )
            if not short or path in linked or any(path in ids for ids in own):
                continue
            if not in_reference:
                linked.add(path)
            options = {"refdomain": "py", "reftype": "obj", "reftarget": path, "refwarn": True}
            reference_node = addnodes.pending_xref("", refdoc=self.env.docname, refexplicit=True, **options)
            node.replace_self(reference_node)
            reference_node += node

        for node in self.document.findall(addnodes.pending_xref):
            node.attributes.pop("refspecific", None)  # a type of a signature is what its full name says


def _around(node: nodes.Node) -> Iterator[nodes.Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def _docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    said = reference.text_of("\n".join(lines), reference.parameters(name, obj), getattr(obj, "__module__", None) or "")
    lines[:] = said.splitlines()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _docstring)
    app.add_post_transform(LinkedNames)
