"""Results in, pictures and one self-contained HTML report out; never trains."""

from .page import report
from .picture import picture

__all__ = ["picture", "report"]
