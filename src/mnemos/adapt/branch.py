"""GRC beside an attention that someone else wrote: the child `grc` of a host's attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.attention.gated_branch import GatedBranch
from mnemos.memory.gated_cache import begin_forward, end_forward, promote
from mnemos.memory.grc import GRC
from mnemos.ops.precision import autocasts
from mnemos.types import InputError

from .host import Host, Place


class HostBranch(GatedBranch):
    """The cached branch beside a host's own attention: `y = branch(x, y, mask=None)`.

        O^h = σ(λ_h)·(lift(o_mem))^h + (1 − σ(λ_h))·y^h        h: groups of D/H channels

    x [B, T, D_in] is the attention's input, y [B, T, D] what it made of it; mask [B, T] bool, True = valid. With the
    gate closed (λ → −∞) y is returned to the bit. Cost of a training forward a sample, in multiply-adds: the update
    4·Tm·Dm² (and 2·Tm·Dm² once a batch), keys and values 2·Tm·Dm², queries T·Dm², scores and values 2·T·Tm·Dm, lift
    T·Dm·D; frozen (`inference="frozen"`, eval()) only the last three: see mnemos/ops/gated_cache/cost.py.
    """

    def __init__(self, host: Host, place: Place, grc: GRC, dim: int, out_dim: int, num_heads: int) -> None:
        if grc.scope == "stream":
            raise InputError('a host carries no state from call to call: use scope="shared"')
        super().__init__(dim, num_heads, grc, out_dim=out_dim, grid=place.grid, prefix=place.prefix)
        self.host, self.out_dim = host, out_dim
        if self.convolution is not None:  # the host is to start as it was
            nn.init.zeros_(self.convolution.weight)
            assert self.convolution.bias is not None
            nn.init.zeros_(self.convolution.bias)
        self.valid: Tensor | None = None  # of the forward in progress, where the host gives its mask elsewhere
        self.register_load_state_dict_pre_hook(_keep_own)
        self.kept: str | None = None  # under this prefix the last checkpoint had nothing, and it kept what it had
        self.observer: Callable[[HostBranch, Tensor, Tensor], Any] | None = None  # is shown y and lift(o_mem)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        if x.dim() != 3 or x.shape[-1] != self.dim or y.shape != (*x.shape[:2], self.out_dim):
            raise InputError(
                f"the host's attention was expected to map [B, T, {self.dim}] to [B, T, {self.out_dim}], found "
                f"{tuple(x.shape)} to {tuple(y.shape)}; name others with where="
            )
        if mask is not None and (mask.shape != x.shape[:2] or mask.dtype != torch.bool):
            raise InputError(
                f"expected a mask of booleans {tuple(x.shape[:2])}, found {mask.dtype} {tuple(mask.shape)}"
            )
        # Part of a model whose own forward has begun (see `hooks`), or called alone, as a part of it may be.
        began = self.training and self.complete and begin_forward([self])
        try:
            mixed = self._mixed(y, self._memory(x, y, mask))
            if self.convolution is not None:
                mixed = mixed + self.convolve(x).to(y.dtype)
        except BaseException:
            if began:
                promote([self])  # of a forward that did not end: nothing, and the next one begins afresh
            raise
        if began:
            end_forward([self])
        return mixed

    def _memory(self, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        """o_mem [B, T, H, Dm/H]."""
        x = x[..., : self.cache_dim]
        query = self.queries(x)
        if not self.moves:
            return self.frozen(query)
        summary, valid = self.summarised(x if self.grc.source == "input" else y[..., : self.cache_dim], mask)
        return self.read(query, self.current(summary, valid))

    def _mixed(self, y: Tensor, o_mem: Tensor) -> Tensor:
        if self.observer is not None:
            self.observer(self, y, self.lifted(o_mem).flatten(2))
        if self.grc.lift == "pad":
            share = torch.sigmoid(self.mix)
            heads = y.unflatten(-1, (self.num_heads, -1))
            return torch.lerp(heads, self.lifted(o_mem).to(y.dtype), share.to(y.dtype)[:, None]).flatten(2)
        assert self.lift is not None
        weight, bias, rest = self.remembered("mixing", (self.mix, *self.lift.parameters()), self._mixing)
        base = torch.addcmul(bias.to(y.dtype), y, rest.to(y.dtype))
        rows = o_mem.flatten(2).flatten(0, 1)
        if rows.dtype == weight.dtype == base.dtype and not autocasts(y.device.type):
            # Into y's share, in one pass.
            return base.flatten(0, 1).addmm_(rows, weight.t()).unflatten(0, y.shape[:2])
        return base + F.linear(rows, weight).unflatten(0, y.shape[:2]).to(y.dtype)

    def _mixing(self) -> tuple[Tensor, Tensor, Tensor]:
        """σ(λ) by channel times the weights and the bias of the lift, which are few, and 1 − σ(λ)."""
        assert self.lift is not None
        share = torch.sigmoid(self.mix).repeat_interleave(self.out_dim // self.num_heads)
        return self.lift.weight * share[:, None], self.lift.bias * share, 1 - share

    def extra_repr(self) -> str:
        """Host, slots, width and preset."""
        return f"host={self.host.name!r}, {super().extra_repr()}"


def _keep_own(branch: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A checkpoint of the host alone has no entry for the branch: the branch keeps its values, also if strict=True."""
    assert isinstance(branch, HostBranch)
    branch.kept = None if any(key.startswith(prefix) for key in state_dict) else prefix
    if branch.kept is not None:
        state_dict.update(branch.state_dict(prefix=prefix))
