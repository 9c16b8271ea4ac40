"""Exact gradients through arbitrarily long sequences at the memory of one step, for any recurrent model.

Three ideas. `rollout.py` is Algorithm 1 as one loop: read it first. A step must run twice in the same way, so
`start.py` keeps what it starts from: the state, random generators, and what the model keeps by itself. `steps.py` joins
one step's backward pass to that of the later ones, and compares the two runs. Then `distributed.py`, what several
processes need, and `engine.py`, the rollouts of all trainers here.
"""

from typing import TYPE_CHECKING

from mnemos.face import lazy

if TYPE_CHECKING:
    from .rollout import ReplayResult as ReplayResult
    from .rollout import replay as replay
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
