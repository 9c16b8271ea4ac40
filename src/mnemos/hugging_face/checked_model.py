"""Which models of Transformers `functional` takes: what their class and configuration say, before a token is read."""

import inspect
from typing import Any

from torch import nn

from mnemos import libraries
from mnemos.types import InputError

_CACHES = (*libraries.CACHE_NAMES, "cache_params", "state")  # what forwards of Transformers call their cache
_UNFIT = {  # what their caches ask of a call
    "cpmant": "reads the ids of all earlier tokens in every call; use another model",
    "prophetnet": "reads one token in a call with a cache; use another model",
    **dict.fromkeys(
        ("MnemosForCausalLM", "RememberingForCausalLM"), "has its own state; call y, state = model.model(x, state)"
    ),
}


def checked_model(model: nn.Module) -> tuple[Any, str]:
    """The model of Transformers inside an adapter of PEFT, or the model; and what its forward calls its cache."""
    adapted: Any = model
    base: Any = adapted.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, libraries.transformers().PreTrainedModel):
        raise InputError(
            f"functional: expected a model of Hugging Face Transformers, found {type(model).__name__}; give the model "
            "itself, without torch.compile or DistributedDataParallel around it (models of mnemos are called as y, "
            "state = model(x, state) already)"
        )
    takes = inspect.signature(base.forward).parameters
    cache = next((name for name in _CACHES if name in takes), None)
    name, config = type(base).__name__, base.config
    if cache is None:
        raise InputError(
            f"functional: expected a causal model with a cache, found {name}, whose forward takes none of "
            f"{', '.join(_CACHES)}; use a decoder"
        )
    if unfit := _UNFIT.get(config.model_type) or _UNFIT.get(name):
        raise InputError(f"functional: expected a model that goes on from any cache, found {name}, which {unfit}")
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise InputError(
            f"functional: expected a decoder alone, found {name}, which reads an encoder; use mnemos.EncoderDecoder, "
            "or a decoder without cross-attention"
        )
    return base, cache
