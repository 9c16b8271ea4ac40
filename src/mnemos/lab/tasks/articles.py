"""The articles in a file of WikiText: each begins with its heading, a line " = Title = " after a blank line."""

import itertools
import re

import numpy as np
from numpy.typing import NDArray

from mnemos.types import InputError

# The blank line before a heading belongs to its article. Section headings (" = = Title = = ") begin none.
_HEADING = re.compile(rb"(?m)(?:^[ \t\r]*\n|\A(?:\xef\xbb\xbf)?)[ \t]*= (?!=)[^\n]*(?<!=) =[ \t\r]*$")


def divided(documents: dict[str, NDArray[np.uint8]]) -> dict[str, NDArray[np.uint8]]:
    """The articles of documents as {"name#001": bytes [n]}, in their order.

    Text before a file's first heading, and a file without headings, is an article of its own. Raises InputError if no
    file has a heading.
    """
    found: dict[str, NDArray[np.uint8]] = {}
    headings = 0
    for name, document in documents.items():
        starts = [match.start() for match in _HEADING.finditer(document.tobytes())]
        headings += len(starts)
        bounds = sorted({0, *starts, len(document)})
        width = len(str(len(bounds) - 1))
        for i, (first, last) in enumerate(itertools.pairwise(bounds), start=1):
            found[f"{name}#{i:0{width}}"] = document[first:last]
    if not headings:
        raise InputError(
            'data.articles: expected files with headings of WikiText, lines " = Title = " after a blank line, found '
            f"none in {len(documents)} files; use data.articles False"
        )
    return found
