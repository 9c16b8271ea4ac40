"""What any memory must keep, checked: `check_memory` for layers of anyone, `verify` for the kernels on this machine."""

from .check import Report, Result, check_memory
from .laws import LAWS
from .machine import Verified, verify
from .probe import Law

__all__ = ["LAWS", "Law", "Report", "Result", "Verified", "check_memory", "verify"]
