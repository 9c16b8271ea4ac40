"""Models of Hugging Face Transformers as `y, state = step(x, state)`, and models of this library in Transformers.

Names are imported when they are first used: those of the second kind import the library transformers.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from mnemos import libraries
from mnemos.errors import InputError

if TYPE_CHECKING:
    from .functional_cache import FunctionalState as FunctionalState
    from .functional_model import Functional as Functional
    from .functional_model import functional as functional
    from .registration import MnemosConfig as MnemosConfig
    from .registration import MnemosForCausalLM as MnemosForCausalLM
    from .registration import MnemosForSeq2SeqLM as MnemosForSeq2SeqLM
    from .registration import MnemosForSequenceClassification as MnemosForSequenceClassification
    from .registration import MnemosPreTrainedModel as MnemosPreTrainedModel
    from .registration import RememberingConfig as RememberingConfig
    from .registration import RememberingForCausalLM as RememberingForCausalLM
    from .registration import StateCache as StateCache
    from .registration import register as register

_NAMES = {"FunctionalState": "functional_cache", "Functional": "functional_model", "functional": "functional_model"}
_IN_TRANSFORMERS = "Config ForCausalLM ForSeq2SeqLM ForSequenceClassification PreTrainedModel"
_NAMES |= {name: "registration" for name in ("StateCache", "register")}
_NAMES |= {name: "registration" for name in ("RememberingConfig", "RememberingForCausalLM")}
_NAMES |= {f"Mnemos{name}": "registration" for name in _IN_TRANSFORMERS.split()}

__all__ = sorted(_NAMES)


def _imported(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_NAMES[name]}")
    except ImportError as error:
        if not (error.name or "").startswith("transformers"):
            raise
        raise InputError(
            f"mnemos.hugging_face: expected transformers {' or '.join(libraries.TRIED)} (the versions tried), found "
            f"{version('transformers')}, in which something has another place ({error}); run: "
            "pip install 'mnemos-torch[hf]'"
        ) from error
    return getattr(module, name)


if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept any name, as Any
    __getattr__ = _imported


def __dir__() -> list[str]:
    return __all__
