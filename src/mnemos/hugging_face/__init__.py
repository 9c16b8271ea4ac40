"""Models of Hugging Face Transformers on this library's kernels and states, and this library's models in Transformers.

Four ideas, each with its files in the order of reading:

1. `fast` puts our kernels into a model of Transformers: `fast_model`, `fast_functions`, `fast_token`, and for layers
   that any model has `fast_dense` and `fast_attention`.
2. `functional` turns a model of Transformers into `y, state = step(x, state)`, with the functions of `fast`:
   `functional_model`, `functional_cache`.
3. A model of ours becomes a model of Transformers, which generates from it, trains and saves it: `pretrained_model`,
   `pretrained_heads`, `remembering_model`.
4. Assisted generation removes the draft tokens that a model of ours rejects from its cache: `state_cache`.
"""

import importlib
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING

from mnemos.face import lazy

if TYPE_CHECKING:
    from .fast_model import FastReport as FastReport
    from .fast_model import fast as fast
    from .functional_cache import FunctionalState as FunctionalState
    from .functional_model import Functional as Functional
    from .functional_model import functional as functional
    from .pretrained_heads import MnemosForCausalLM as MnemosForCausalLM
    from .pretrained_heads import MnemosForSeq2SeqLM as MnemosForSeq2SeqLM
    from .pretrained_heads import MnemosForSequenceClassification as MnemosForSequenceClassification
    from .pretrained_model import MnemosConfig as MnemosConfig
    from .pretrained_model import MnemosPreTrainedModel as MnemosPreTrainedModel
    from .remembering_model import RememberingConfig as RememberingConfig
    from .remembering_model import RememberingForCausalLM as RememberingForCausalLM
    from .remembering_model import register as register
    from .state_cache import StateCache as StateCache

_IN_TRANSFORMERS = ("pretrained_heads", "pretrained_model", "remembering_model", "state_cache")


def _load(module: str) -> ModuleType:
    try:
        loaded = importlib.import_module(module)
        if module.rpartition(".")[2] in _IN_TRANSFORMERS:
            importlib.import_module(f"{__name__}.remembering_model")  # registers our models with the Auto classes
    except ImportError as error:
        if not (error.name or "").startswith("transformers"):
            raise
        from mnemos import libraries

        raise libraries.other_version(
            "mnemos.hugging_face: expected",
            f"{version('transformers')}, whose modules have moved ({error})",
        ) from error
    return loaded


if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept any name, as Any
    __getattr__, __dir__, __all__ = lazy(__name__, load=_load)
