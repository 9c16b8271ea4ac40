"""carry(model, state, ...): a call of a cached encoder from and to the state of its rows, for texts in segments."""

from typing import Any

from torch import Tensor, nn

from mnemos.types import InputError

from .branch import HostBranch
from .decoder_branch import DecoderBranch
from .row_caches import carried

RowState = dict[str, Tensor]  # the caches [B, Tm, Dm] of the rows by the names of their branches


def carry(model: nn.Module, state: RowState | None, *args: Any, **kwargs: Any) -> tuple[Any, RowState]:
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
            "carry: expected an encoder, found a causal decoder, which carries its caches in past_key_values; use "
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
    with carried({named[name]: caches for name, caches in (state or {}).items()}) as rows:
        output = model(*args, **kwargs)
    return output, {name: rows.after[one] for name, one in named.items() if one in rows.after}
