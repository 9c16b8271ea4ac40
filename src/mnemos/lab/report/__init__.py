"""Results in, one self-contained HTML report out; never trains. Start with `page`, whose SECTIONS are the modules."""

from .page import report

__all__ = ["report"]
