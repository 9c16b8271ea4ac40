"""What any memory must keep, checked: `check_memory` for layers."""

from .check import Report, Result, check_memory
from .laws import LAWS, Law

__all__ = ["LAWS", "Law", "Report", "Result", "check_memory"]
