"""Results in, one self-contained HTML report out; never trains. Start with `page`, whose SECTIONS are in its order."""

from .page import report

__all__ = ["report"]
