"""Models of Hugging Face Transformers as `y, state = step(x, state)`, and models of this library in Transformers.

Names are imported when they are first used: those of the second kind import the library transformers.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from mnemos import libraries

if TYPE_CHECKING:
    from .croppable_cache import CroppableCache as CroppableCache
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

_FUNCTIONAL = {
    "croppable_cache": "CroppableCache",
    "fast_model": "FastReport fast",
    "functional_cache": "FunctionalState",
    "functional_model": "Functional functional",
}
_IN_TRANSFORMERS = {
    "pretrained_heads": "MnemosForCausalLM MnemosForSeq2SeqLM MnemosForSequenceClassification",
    "pretrained_model": "MnemosConfig MnemosPreTrainedModel",
    "remembering_model": "RememberingConfig RememberingForCausalLM register",
    "state_cache": "StateCache",
}
_NAMES = {name: module for module, row in (_FUNCTIONAL | _IN_TRANSFORMERS).items() for name in row.split()}

__all__ = sorted(_NAMES)


def _import_name(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_NAMES[name]}")
        if _NAMES[name] in _IN_TRANSFORMERS:
            importlib.import_module(f"{__name__}.remembering_model")  # registers them
    except ImportError as error:
        if not (error.name or "").startswith("transformers"):
            raise
        raise libraries.other_version(
            "mnemos.hugging_face: expected",
            f"{version('transformers')}, in which something has another place ({error})",
        ) from error
    return getattr(module, name)


if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept any name, as Any
    __getattr__ = _import_name


def __dir__() -> list[str]:
    return __all__
