"""The weight γ of the far part of each head at the start, fitted to the attention of the model as it was.

A fixed start does no harm in any head, and is far too small in most: what heads of a trained decoder read beyond their
window differs by several powers of e.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mnemos.hosts.linearised import Linearised

from .original import calls_of_original

GRID = tuple(float(g) for g in range(-12, 5, 2))  # ln γ


class _Spy:
    """In place of `Linearised.read`: keeps what it was called with."""

    def __init__(self, own: Linearised) -> None:
        self.own = own
        self.given: tuple[Any, ...] = ()

    def __call__(self, *given: Any) -> Any:
        self.given = given
        return type(self.own).read(self.own, *given)


@torch.no_grad()
def fit_weights(model: Any, changed: dict[str, nn.Module], ids: Tensor) -> Tensor:
    """Set γ of every head to that of `GRID` with the least error of its output on `ids` [B, T], T > w.

    The error is Σ‖y − y*‖² over the tokens beyond the window, y* softmax attention over all tokens, with the queries,
    keys and values of the model before it was linearised. Only γ changes: the feature maps stay. Returns the share of
    the error of the window alone that is left, [attentions, H].

    Cost: a forward of the model, and of each attention len(GRID) + 2 forwards without projections.
    """
    seen = calls_of_original(model, changed, ids)
    left = []
    for name, module in changed.items():
        own: Any = module.linearised
        given, named, _ = seen.pop(name)
        spy = _Spy(own)
        own.read = spy
        try:
            module(*given, **named)
        finally:
            del own.read
        tokens, state = spy.given
        sizes = tokens.sizes
        whole = own.read(tokens._replace(sizes=sizes._replace(window=tokens.q.shape[2])), state)[0]
        errors = []
        for value in (-torch.inf, *GRID):
            own.log_gamma.fill_(value)
            y = own.read(tokens, state)[0]
            errors.append((y - whole)[:, sizes.window :].square().sum((0, 1, 3)))
        found = torch.stack(errors)
        least = found[1:].argmin(0)
        own.log_gamma.copy_(torch.tensor(GRID, device=least.device)[least])
        left.append(found[1:].amin(0) / found[0].clamp(min=1e-30))
    return torch.stack(left)
