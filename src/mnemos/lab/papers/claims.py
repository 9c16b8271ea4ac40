"""The registry of papers for `mnemos reproduce PAPER/CLAIM`."""

import difflib

from mnemos.types import InputError

from .cached_transformers.claims import CACHED_TRANSFORMERS
from .claim import Claim, Paper
from .linear_transformers.claims import LINEAR_TRANSFORMERS
from .memformer.claims import MEMFORMER

__all__ = ["PAPERS", "Claim", "Paper", "paper"]

PAPERS = {paper.name: paper for paper in (CACHED_TRANSFORMERS, LINEAR_TRANSFORMERS, MEMFORMER)}


def paper(name: str) -> Paper:
    """The paper `name`. Raises InputError, with the most similar name, for an unknown one."""
    if name not in PAPERS:
        near = difflib.get_close_matches(name, PAPERS, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of these"
        raise InputError(f"expected a paper ({', '.join(PAPERS)}), found {name!r}; {hint}")
    return PAPERS[name]
