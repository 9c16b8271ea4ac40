"""The laws of every memory, and what tests them: `check_memory` on any layer, `verify` the kernels on this machine.

A law is a function that looks for a counterexample (`laws`; laws of weights are in `weights`). `probe` wraps a layer as
the laws run it, and shrinks a counterexample. `check` tries all laws and reports. `machine` has `verify`.
"""

from typing import TYPE_CHECKING

from mnemos.face import lazy

if TYPE_CHECKING:
    from .check import Report as Report
    from .check import Result as Result
    from .check import check_memory as check_memory
    from .laws import LAWS as LAWS
    from .machine import Verified as Verified
    from .machine import verify as verify
    from .probe import Law as Law
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
