"""Connectionist temporal classification (Graves et al. 2006): what models that transcribe speech share."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mnemos.lab.hosted.model import Stateless
from mnemos.types import InputError, check_stateful


class Transcriber(Stateless, nn.Module):
    """Base of models of frames: `logits, None = model(x, state=None, mask=None)`.

    x [B, T, bands] floats, B, T ≥ 1; mask [B, T] bool, True for a row's frames, which come first, False for the padding
    after them; logits [B, ⌈T/stack⌉, vocab_size + 1], where the last class is the blank; those of padding have no
    meaning. Each row is read as a whole, so there is no state. `config` has bands, vocab_size and stack, the number of
    consecutive frames that `encode` reads as one. Raises InputError for other shapes.
    """

    config: Any
    head: nn.Module

    def encode(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Stacked frames [B, T', stack·bands], zeros where the mask [B, T'] is False -> what `head` reads."""
        raise NotImplementedError

    def forward(self, x: Tensor, state: None = None, mask: Tensor | None = None) -> tuple[Tensor, None]:
        # --- checks ---
        bands, size = self.config.bands, self.config.stack
        if x.dim() != 3 or x.shape[-1] != bands or not x.is_floating_point() or not x.numel():
            raise InputError(
                f"expected frames [B, T, {bands}] of floats, B and T at least 1, found {x.dtype} of {tuple(x.shape)}"
            )
        if mask is not None and (mask.shape != x.shape[:2] or mask.dtype != torch.bool):
            raise InputError(
                f"expected a mask of booleans {tuple(x.shape[:2])}, True = valid; found {mask.dtype} "
                f"{tuple(mask.shape)}"
            )
        if mask is not None and bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            raise InputError("expected the valid frames of a row before its padding, found some behind it; move them")
        check_stateful(self.state_kind, state)

        # --- `stack` frames become one; a last one that is half padding is a frame, so padding must be zeros in it ---
        if mask is not None:
            x, mask = torch.where(mask[..., None], x, 0.0), mask[:, ::size]
        x = F.pad(x, (0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size)).flatten(2)
        return self.head(self.encode(x, mask)), None

    if TYPE_CHECKING:
        __call__ = forward

    @property
    def likelihood(self) -> "Transcriber":
        """Scores the outputs: the model itself, because the score depends on its `stack`."""
        return self

    def loss(self, outputs: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """The sum of −log p(targets) for targets [B, L] int64, negative where there are none.

        p sums over all paths that give the targets after repeats are joined and blanks removed. A row without tokens
        does not count. Cost: O(B·T·L). On a GPU, torch's gradient adds in no fixed order, so two runs agree to rounding
        only. Raises InputError if a row has more tokens than its frames can express.
        """
        real = targets >= 0
        counts = real.sum(1)
        lengths = self._lengths(outputs, mask)
        spoken = torch.where(real, targets, 0)  # token 0 where there is none; `counts` excludes it
        # A path needs a frame per token, and a blank between two equal tokens.
        needed = counts + ((spoken[:, 1:] == spoken[:, :-1]) & real[:, 1:]).sum(1)
        if len(wrong := (needed > lengths).nonzero()):
            row = int(wrong[0])
            raise InputError(
                f"row {row}: expected at least {int(needed[row])} outputs for its {int(counts[row])} tokens (one more "
                f"between two equal ones), found {int(lengths[row])}, one for every {self.config.stack} frame(s); "
                "remove the row, or lower model.stack"
            )
        losses = F.ctc_loss(
            outputs.to(torch.promote_types(outputs.dtype, torch.float32)).log_softmax(-1).transpose(0, 1),
            spoken,
            lengths,
            counts,
            blank=self.config.vocab_size,
            reduction="none",
        )
        return torch.where(counts > 0, losses, 0).sum()

    @torch.no_grad()
    def right(self, outputs: Tensor, targets: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(tokens less edits, tokens) for targets [B, L] int64, negative where there are none.

        Edits are the fewest insertions, deletions and substitutions between the targets and the likeliest path; they
        may be more than the tokens, and the first number negative. A row without tokens counts for nothing.
        """
        counts = (targets >= 0).sum(1)
        heard, heard_counts = best_path(outputs, self._lengths(outputs, mask), self.config.vocab_size)
        edits = torch.where(counts > 0, edit_distance(targets, counts, heard, heard_counts), 0)
        return (counts - edits).sum(), counts.sum()

    @torch.no_grad()
    def transcribe(self, frames: Tensor, mask: Tensor | None = None) -> list[list[int]]:
        """The tokens recognised in frames [B, T, bands], one list per row: the most likely path, decoded greedily."""
        logits = self(frames, None, mask=mask)[0]
        heard, counts = best_path(logits, self._lengths(logits, mask), self.config.vocab_size)
        return [row[:count] for row, count in zip(heard.tolist(), counts.tolist(), strict=True)]

    def _lengths(self, outputs: Tensor, mask: Tensor | None) -> Tensor:
        """The number of outputs per row [B] that are not padding."""
        if mask is None:
            return torch.full(outputs.shape[:1], outputs.shape[1], device=outputs.device)
        return (mask.sum(1) + self.config.stack - 1) // self.config.stack


def best_path(logits: Tensor, lengths: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """The most likely class of each frame, repeats joined, blanks removed: tokens [B, T] and their number per row [B].

    logits [B, T, C]; a row's first `lengths` [B] count. Entries after a row's tokens have no meaning.
    """
    path = logits.argmax(-1)
    keep = (path != blank) & (torch.arange(path.shape[1], device=path.device) < lengths[:, None])
    keep[:, 1:] &= path[:, 1:] != path[:, :-1]
    order = torch.argsort((~keep).byte(), dim=1, stable=True)
    return path.gather(1, order), keep.sum(1)


def edit_distance(a: Tensor, a_lengths: Tensor, b: Tensor, b_lengths: Tensor) -> Tensor:
    """The Levenshtein distance [B] between the first a_lengths [B] of a [B, L] and the first b_lengths [B] of b [B, M].

    B ≥ 1. Cost: O(B·L·M), in max(b_lengths) sequential operations on whole rows.
    """
    steps = torch.arange(a.shape[1] + 1, device=a.device)
    row = steps.expand(a.shape[0], -1)  # distances from each prefix of a to the empty prefix of b
    last = row
    for j in range(int(b_lengths.max())):
        replaced = row[:, :-1] + (a != b[:, j : j + 1])
        new = torch.cat([row[:, :1] + 1, torch.minimum(replaced, row[:, 1:] + 1)], 1)
        # Deletions of consecutive tokens of a: new[i] = min over k ≤ i of new[k] + (i − k).
        row = (new - steps).cummin(1).values + steps
        last = torch.where(b_lengths[:, None] > j, row, last)
    return last.gather(1, a_lengths[:, None])[:, 0]
