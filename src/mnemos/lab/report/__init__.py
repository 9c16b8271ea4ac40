"""Results in, pictures and one self-contained HTML report out; never trains."""

from .page import report
from .summary_image import picture

__all__ = ["picture", "report"]
