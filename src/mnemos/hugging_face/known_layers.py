"""The recurrent layers of Transformers whose step is known, and how a forward of theirs becomes that step."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from .delta_layers import gated_delta
from .functional_cache import FunctionalCache
from .griffin_layers import recurrent_block
from .mamba_layers import mamba, mamba2
from .rwkv_layers import channel_mix, time_mix
from .xlstm_layers import matrix_lstm

Step = Callable[..., Any]  # (layer, cache, its input x) -> what the layer's forward returns
STEPS: dict[str, Step] = {
    "MambaMixer": mamba,
    "FalconMambaMixer": mamba,
    "JambaMambaMixer": mamba,
    "Mamba2Mixer": mamba2,
    "BambaMixer": mamba2,
    "GraniteMoeHybridMambaLayer": mamba2,
    "NemotronHMamba2Mixer": mamba2,
    "Zamba2MambaMixer": mamba2,
    "Qwen3NextGatedDeltaNet": gated_delta,
    "Qwen3_5GatedDeltaNet": gated_delta,
    "Qwen3_5MoeGatedDeltaNet": gated_delta,
    "OlmoHybridGatedDeltaNet": gated_delta,
    "RwkvSelfAttention": time_mix,
    "RwkvFeedForward": channel_mix,
    "RecurrentGemmaRecurrentBlock": recurrent_block,
    "xLSTMLayer": matrix_lstm,
}


def add_steps(model: nn.Module) -> None:
    """Let the recurrent layers of a model run the step of `STEPS` when they are called with a `FunctionalCache`.

    With any other cache, and with none, a layer runs its own forward. The forward of the class is wrapped, once per
    process: instances stay as they are, so copies, pickles, hooks and threads need no care. The layers' own forwards
    cannot serve, whatever their arguments: they change states in place, and padding changes the states.
    """
    for kind in {of for layer in model.modules() for of in type(layer).__mro__}:
        if kind.__name__ in STEPS and kind.__module__.startswith("transformers.") and "_functional" not in vars(kind):
            _dispatch(kind, STEPS[kind.__name__])


def _dispatch(kind: Any, step: Step) -> None:
    theirs = kind.forward

    @functools.wraps(theirs)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        cache = next((x for x in (*args, *options.values()) if isinstance(x, FunctionalCache)), None)
        if cache is None:
            return theirs(self, *args, **options)
        return step(self, cache, args[0] if args else options["hidden_states"])

    kind.forward, kind._functional = forward, True
