"""The cached branch in a model that `cache` was called on: the child `grc` of a host's attention.

`HostBranch` is that of attentions which read a row whole, `DecoderBranch` that of causal decoders, whose cache follows
the tokens. `carry` takes the caches of an encoder's rows from one call to the next. `parameter_groups` gives branches
learning rates of their own.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mnemos.attention.gated import GatedBranch, is_plain_linear
from mnemos.memory.gated_cache import GRC, Projection, begin_forward, end_forward, promote, recomputing
from mnemos.memory.tokens import TokenMemory
from mnemos.ops.dense_layer import dense
from mnemos.ops.gated_cache import grid_shape, onto_grid, pool_grid, resample
from mnemos.ops.precision import autocasts
from mnemos.types import InputError, check_mask

from .grids import GridReader, Grids
from .host import DecoderHost, Host
from .inputs import AttentionInput, Grid
from .masks import combine


class HostBranch(GatedBranch):
    """Mixes a gated cache into a host's attention: `y = branch(x, y, mask=None)`.

        mix="heads":     O^h = σ(λ_h)·o_mem^h + (1 − σ(λ_h))·y^h              h: heads (eq. 2)
        mix="channels":  O^h = σ(λ_h)·(lift(o_mem))^h + (1 − σ(λ_h))·y^h      h: groups of D/H channels

    x [B, T, D_in] is the attention's input; mask [B, T] bool, True = valid. y [B, T, D] is its heads, which its
    projection is then applied to (mix="heads"), or its output, which in most hosts is projected already. With the gate
    closed (λ → −∞) the result is y, bit for bit. With `declared.windows` (Swin, length="paper") x and y are rows of
    windows, and all windows of a sample write and read one cache. With scope="stream" each row has a cache of its own,
    which `carry` takes from call to call; in a call without it rows are new, and their caches zeros.

    Cost of a training forward per sample, in multiply-adds: update 4·Tm·Dm² (and 2·Tm·Dm² once per batch), keys and
    values 2·Tm·Dm², queries T·Dm², scores and values 2·T·Tm·Dm, lift T·Dm·D; mix="heads" has values of D channels and
    no lift. Frozen (`inference="frozen"`, eval()): only the last three. See mnemos/ops/gated_cache/cost.py.
    """

    linear = Projection
    # No name of an attention's own parts: adapters (LoRA) choose the modules that they wrap by the ends of names.
    maps = "to_query", "to_key", "to_value"

    def __init__(self, host: Host, declared: AttentionInput, grc: GRC, dim: int, out_dim: int, num_heads: int) -> None:
        in_rows = declared.rows != 1 or declared.padded is not None or declared.windows is not None
        if grc.scope == "stream" and in_rows:
            raise InputError(
                'expected GRC(scope="shared"), found scope="stream"; the windows of this attention are rows, and only '
                "the rows of a batch carry a cache"
            )
        grc = replace(grc, mix=grc.mix or "channels")
        projected = out_dim if grc.mix == "channels" else None
        super().__init__(dim, num_heads, grc, None, projected, declared.grid, declared.prefix, heads_dim=out_dim)
        self.host, self.out_dim, self.pool, self.windows = host, out_dim, declared.pool, declared.windows
        self.padded = declared.padded
        self.own_grid: GridReader | None = None  # how the attention's calls show the grid of their tokens
        self.grids: Grids | None = None  # or where a module above notes it
        # Which part of each image of a padded batch is the image: `at(grid)`, its sizes in tokens (None: all of it).
        self.valid_part: Any = None
        if self.convolution is not None:  # the initial model computes what the host computes
            nn.init.zeros_(self.convolution.weight)
            assert self.convolution.bias is not None
            nn.init.zeros_(self.convolution.bias)
        self.register_load_state_dict_pre_hook(_keep_own)
        self.lacking: str | None = None  # the prefix under which the last loaded checkpoint had no entries
        # Called with the branch, y and lift(o_mem), or with the heads and o_mem.
        self.observer: Callable[[HostBranch, Tensor, Tensor], object] | None = None

    def forward(
        self, x: Tensor, y: Tensor, mask: Tensor | None = None, **context: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See the class. context: `grid`, that of the tokens, or `carried` (`DecoderBranch`).

        At the input of a projection, with `convolution`: the mixed heads, and the positional term, for its output.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim or y.shape != (*x.shape[:2], self.out_dim):
            raise InputError(
                f"the host's attention: expected to map [B, T, {self.dim}] to [B, T, {self.out_dim}], found "
                f"{tuple(x.shape)} to {tuple(y.shape)}; name others with where="
            )
        check_mask(mask, x.shape[:2])
        # In the model's own forward, hooks begin and end it (see `hooks`). A part of a model called alone does it here.
        began = self.training and self.complete and begin_forward([self])
        try:
            if self.grc.mix == "channels":
                mixed = self._mix_channels(y, self._read_cache(x, y, mask, **context))
            else:
                own = y.unflatten(-1, (self.num_heads, -1))
                if self.observer is None:
                    mixed = self._read_cache(x, y, mask, own=own, **context).flatten(2)
                else:
                    o_mem = self._read_cache(x, y, mask, **context)
                    self.observer(self, y, o_mem.flatten(2))
                    mixed = self.mix_heads(own, o_mem).flatten(2)
            position = None if self.convolution is None else self.convolve(x, context.get("grid"))
        except BaseException:
            if began:
                promote([self])  # discards what the failed forward left: the next one starts again
            raise
        if began:
            end_forward([self])
        if position is None:
            return mixed
        return (mixed, position) if self.inside else mixed + position.to(y.dtype)

    @property
    def inside(self) -> str:
        """The part of the attention into whose first input the branch is mixed; "": it is mixed into the output."""
        projection = self.host.projection if self.grc.mix == "heads" else None
        return self.host.carrier or projection or ""

    def _mix_channels(self, y: Tensor, o_mem: Tensor) -> Tensor:
        if self.observer is not None:
            self.observer(self, y, self.lifted(o_mem).flatten(2))
        share = torch.sigmoid(self.mix)
        if self.lift is None or self.grc.lift == "pad" or not is_plain_linear(self.lift):
            heads = y.unflatten(-1, (self.num_heads, -1))
            return torch.lerp(heads, self.lifted(o_mem).to(y.dtype), share.to(y.dtype)[:, None]).flatten(2)
        # The lift's weights and bias are scaled by σ(λ) per channel, which is cheaper than scaling its outputs.
        share = share.repeat_interleave(self.out_dim // self.num_heads)
        weight = self.lift.weight * share[:, None]
        base = torch.addcmul((self.lift.bias * share).to(y.dtype), y, (1 - share).to(y.dtype))
        alike = o_mem.dtype == weight.dtype == base.dtype and not autocasts(y.device.type)
        if alike and not torch.compiler.is_exporting():  # one fused product and addition, of one row of all tokens
            rows = o_mem.flatten(2).flatten(0, 1)
            return base.flatten(0, 1).addmm_(rows, weight.t()).unflatten(0, y.shape[:2])
        return base + dense(o_mem.flatten(2), weight).to(y.dtype)

    def _read_cache(
        self, x: Tensor, y: Tensor, mask: Tensor | None, own: Tensor | None = None, grid: Grid | None = None
    ) -> Tensor:
        """o_mem [B, T, H, M]; with `own`, the attention's own heads of this shape, mixed with them (eq. 2)."""
        x = x[..., : self.cache_dim]
        windows = None if self.windows is None else self.windows.at(grid)
        asking = x
        if windows is not None:  # one cache for all windows of a sample: their queries are one row
            windows.check(x)
            asking = x.reshape(-1, windows.tokens, x.shape[2])
            own = None if own is None else own.reshape(*asking.shape[:2], *own.shape[2:])
        if self.moves:
            source = x if self.grc.source == "input" else y[..., : self.cache_dim]
            o_mem = self.answer(asking, self.current(*self.summarised(source, mask, grid)), own)
        else:
            o_mem = self.frozen(self.queries(asking))
            o_mem = o_mem if own is None else self.mix_heads(own, o_mem)
        return o_mem if windows is None else o_mem.reshape(*x.shape[:2], *o_mem.shape[2:])

    def current(self, source: Tensor, mask: Tensor | None) -> Tensor:
        """The cache that these tokens update and read; scope="stream": each row's own, [B, Tm, Dm]."""
        if self.grc.scope == "shared":
            return super().current(source, mask)
        carried = _carrying.call
        if recomputing() and carried is None:  # what the first time read is not known here
            raise InputError(
                'GRC(scope="stream") in an encoder: expected activation checkpointing around mnemos.hosts.carry, found '
                "it inside; use it around, or mnemos.replay, which keeps the state of every segment"
            )
        zeros = torch.zeros_like(self.cache)
        # Layers that share a branch, as in ALBERT, all read what was there before the call.
        before = None if carried is None else carried[0].get(self)
        if before is None:
            before = zeros.expand(len(source), -1, -1)
        elif before.shape != (len(source), *zeros.shape):
            raise InputError(
                f"carry: expected a state of {len(source)} rows of {[*zeros.shape]}, found {[*before.shape]}; pass None"
            )
        new = self.update(source, before if self.grc.write else zeros, mask, self.grid)
        if carried is not None:
            carried[1][self] = new if self.grc.write else before
        return new

    def summarised(self, source: Tensor, mask: Tensor | None, grid: Grid | None = None) -> tuple[Tensor, Tensor | None]:
        """The tokens that the cache summarises: all but class tokens and padding, in the grid's order.

        For length="paper", squares are averaged. On another grid than the one that the cache was built for, the tokens
        are brought onto the slots' grid where the slots form one. Of images that padding makes equal in size, each
        one's own part is summarised, as if it were alone (`valid_part`).
        """
        source, mask = super().summarised(source, mask)
        sizes = None if self.valid_part is None or grid is None else self.valid_part.at(grid)
        if self.padded is not None:
            windows = self.padded.at(grid)
            mask = combine(mask, windows.valid(len(source), source.device))
            if sizes is not None and grid is not None:
                inside = self.valid_part.mask(sizes, grid, source.device)[..., None]
                mask = combine(mask, windows.to_windows(inside)[..., 0])
        if self.windows is not None:
            source = self.windows.at(grid).to_grid(source)
        if sizes is None or grid is None or self.padded is not None:
            return self._bring_onto_slots(source, mask, grid)
        if mask is not None:
            raise InputError("expected images padded by their sizes or by a mask, found both; use one of them")
        rows = []
        for row, size in zip(source, sizes, strict=True):  # the upper left part of its tokens [H·W, Dm]
            part = row.unflatten(0, grid)[: size[0], : size[1]].flatten(0, 1)[None]
            slots = self._bring_onto_slots(part, None, size)[0].to(self.cache.dtype)
            rows.append(resample(slots, self.cache.shape[0], None, self.grc.resample, size))
        return torch.cat(rows), None

    def _bring_onto_slots(self, source: Tensor, mask: Tensor | None, grid: Grid | None) -> tuple[Tensor, Tensor | None]:
        """Tokens of a grid, on the slots' grid where the slots form one or squares are averaged, and their mask."""
        if self.pool > 1 and mask is not None:
            raise InputError('GRC(length="paper"): expected no padding mask, found one; give GRC(length=) as numbers')
        if self.grid is None:
            return source, mask
        slots: Grid | None = None
        if self.grc.resample == "grid":
            slots = grid_shape(self.grid, self.cache.shape[0])
        elif self.pool > 1 or self.windows is not None:
            slots = -(-self.grid[0] // self.pool), -(-self.grid[1] // self.pool)
        # The grid of rows of windows is that of a window, the same in every call.
        own = grid is None or self.padded is not None or grid == self.grid
        if slots is not None and grid is not None and not own:
            source = onto_grid(source.to(self.cache.dtype), grid, slots, mask, self.grc.resample != "grid")
            mask = None if mask is None else mask.any(1, keepdim=True).expand(-1, source.shape[1])
        elif self.pool > 1:
            source = pool_grid(source.to(self.cache.dtype), self.grid, self.pool)
        return source, mask

    @property
    def needs_grid(self) -> bool:
        """Whether what the branch computes depends on the grid of the tokens."""
        layout = self.padded, self.windows, self.valid_part, self.convolution
        return self.pool > 1 or self.grc.resample == "grid" or any(one is not None for one in layout)

    def convolve(self, x: Tensor, grid: Grid | None = None) -> Tensor:
        """The positional term [B, T, D], over the whole grid also where it is divided into windows."""
        if self.windows is None:
            return super().convolve(x, None if self.padded is not None else grid)
        windows = self.windows.at(grid)
        return windows.to_windows(super().convolve(windows.to_grid(x), windows.grid))

    def extra_repr(self) -> str:
        """Host, mixing, slots, width and preset."""
        return f"host={self.host.name!r}, mix={self.grc.mix!r}, {super().extra_repr()}"


def _keep_own(branch: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Keep the branch's values if a checkpoint has none, as one of the host alone; strict=True must accept it."""
    assert isinstance(branch, HostBranch)
    branch.lacking = None if any(key.startswith(prefix) for key in state_dict) else prefix
    if branch.lacking is not None:
        state_dict.update(branch.state_dict(prefix=prefix))


class DecoderBranch(HostBranch):
    """Mixes a gated cache into a decoder's attention: `y = branch(x, y, mask=None, carried=None)`.

    The equation is that of `HostBranch`, and the causal form that of `GatedCacheAttention`: a row's valid tokens form
    blocks of `grc.block` tokens, else Tm, and each block reads the cache that the blocks before it built. So an output
    depends on no later token, and the gates get a gradient in rows of more than one block, else one of zero. carried:
    the state of the rows, which the call advances: a `RowState`, or what stands for it in `mnemos.functional`; None:
    all rows are new.

    scope="stream": a cache per row, which starts at zeros, with gradient through the carried state. scope="shared": new
    rows start from the stored cache; a training forward stores the mean of the caches of the rows that completed a
    block, and the carried state has no gradient. inference="frozen": in eval mode all tokens read the stored cache.

    Cost of a forward: as `HostBranch`, with one update, one projection of keys and values per block and row.
    """

    host: DecoderHost

    @property
    def block(self) -> int:
        """The number of tokens between two updates."""
        return self.grc.block or self.cache.shape[0]

    def _read_cache(
        self,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        own: Tensor | None = None,
        grid: Grid | None = None,
        carried: Any = None,
    ) -> Tensor:
        o_mem = self._read_rows(x[..., : self.cache_dim], y, mask, carried)
        return o_mem if own is None else self.mix_heads(own, o_mem)

    def _read_rows(self, x: Tensor, y: Tensor, mask: Tensor | None, carried: Any) -> Tensor:
        """o_mem [B, T, H, M]."""
        if not self.moves:
            return self.frozen(self.queries(x))
        source = (x if self.grc.source == "input" else y[..., : self.cache_dim]).to(self.cache.dtype)

        shared = self.grc.scope == "shared"
        start = self.contents() if shared else torch.zeros_like(self.cache)  # zeros, whatever the buffer holds
        if carried is None:
            return self.in_blocks(x, None, source, None, mask, start)[0]

        def read(x: Tensor, cache: Tensor, own: Tensor | None) -> Tensor:
            both = carried.project(cache, lambda c: (self._split("key", c), self._split("value", c)))
            return self._attend(self.queries(x), *both)

        decodes = x.shape[1] <= self.block and not torch.is_grad_enabled() and not self.training
        o_mem, after = self.in_blocks(x, None, source, carried.current(), mask, start, read if decodes else None)
        carried.extend(x.shape[1], after)
        return o_mem


RowCaches = dict[str, Tensor]  # the caches [B, Tm, Dm] of the rows of an encoder by the names of their branches


class _Carrying(threading.local):
    """The call of `carry` that is being made: caches of its rows by branch, before and after it."""

    call: tuple[Mapping[nn.Module, Tensor], dict[nn.Module, Tensor]] | None = None


_carrying = _Carrying()  # threads may share a model


def carry(model: nn.Module, state: RowCaches | None, *args: Any, **kwargs: Any) -> tuple[Any, RowCaches]:
    """`output, state = carry(model, state, ...)`: call model(...), whose caches go on from the state of the rows.

        mnemos.cache(bert, mnemos.GRC(scope="stream"))
        state = None                                       # new rows
        for segment in segments:
            output, state = mnemos.hosts.carry(bert, state, input_ids=segment)

    For models that are not causal: an encoder reads each segment whole, and its caches alone go from one to the next.
    A call reads C_t, which its own tokens have updated, so what is known of earlier segments is in the cache, and the
    gates get a gradient of it. The gradient flows through the state; `mnemos.types.detach` cuts it. A row without a
    valid token keeps its cache. A cache that is never written, `GRC(...).unwritten()`, stays as it started: zeros.

    Returns the model's output and the state {name of a branch: [B, Tm, Dm]}; `mnemos.types.select` takes rows of it.
    Cost: that of the call. Raises InputError for a model without caches of scope "stream", for a causal decoder, whose
    caches are in its `past_key_values` (`mnemos.functional`), for the state of another model or of other rows, and for
    activation checkpointing inside the model; around this function it works, and so does `mnemos.replay`.
    """
    branches = {name: one for name, one in model.named_modules() if isinstance(one, HostBranch)}
    if any(isinstance(one, DecoderBranch) for one in branches.values()):
        raise InputError(
            "carry: expected an encoder, found a causal decoder; its caches are in past_key_values, or in the state of "
            "mnemos.functional(model)"
        )
    named = {name: one for name, one in branches.items() if one.grc.scope == "stream"}
    if not named:
        raise InputError(
            'carry: expected a model with mnemos.cache(model, GRC(scope="stream")), found '
            f"{'caches that all rows share' if branches else 'none of its caches'}; a cache per row is its state"
        )
    if unknown := [name for name in state or () if name not in named]:
        raise InputError(f"carry: expected a state of {', '.join(named)}, found {unknown[0]}; pass None to begin")
    outside, after = _carrying.call, dict[nn.Module, Tensor]()
    _carrying.call = {named[name]: caches for name, caches in (state or {}).items()}, after
    try:
        output = model(*args, **kwargs)
    finally:
        _carrying.call = outside
    return output, {name: after[one] for name, one in named.items() if one in after}


def is_gate(name: str) -> bool:
    """Whether a parameter's name is that of λ, the gate of a cache."""
    return name.rpartition(".")[2] == "mix"


def decays(name: str, parameter: Tensor) -> bool:
    """Whether a parameter has weight decay: matrices have it; vectors, biases, λ and constants of caches have none."""
    return parameter.dim() >= 2 and not name.endswith("bias") and name.rpartition(".")[2] not in ("mix", "cache")


def parameter_groups(
    model: nn.Module,
    lr: float,
    branch_lr: float | None = None,
    gate_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Groups for an optimiser of torch.optim: the host's parameters, those of its memory, and the gates λ.

        torch.optim.AdamW(mnemos.hosts.parameter_groups(model, lr=1e-5, branch_lr=1e-3, weight_decay=0.05))

    The memory is the branches of `mnemos.cache` and the memory tokens of `mnemos.remember`. lr: of the host; branch_lr:
    of the memory (None: lr); gate_lr: of λ (None: branch_lr). Weight decay is as in the trainer: on matrices alone.
    Parameters without requires_grad are left out, and so are groups without parameters.
    """
    branch_lr = lr if branch_lr is None else branch_lr
    rates = {"host": lr, "branch": branch_lr, "gate": branch_lr if gate_lr is None else gate_lr}
    memories = [part for part in model.modules() if isinstance(part, HostBranch | TokenMemory)]
    own = {id(parameter) for memory in memories for parameter in memory.parameters()}
    groups: dict[tuple[str, bool], list[Tensor]] = {(role, decayed): [] for role in rates for decayed in (True, False)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            role = "host" if id(parameter) not in own else "gate" if is_gate(name) else "branch"
            groups[role, decays(name, parameter)].append(parameter)
    return [
        {"params": parameters, "lr": rates[role], "weight_decay": weight_decay if decayed else 0.0}
        for (role, decayed), parameters in groups.items()
        if parameters
    ]
