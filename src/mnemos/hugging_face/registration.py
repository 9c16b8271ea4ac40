"""The models of this library under the Auto classes of Transformers: registered when this module is imported."""

import sys
from typing import Any

from mnemos import libraries

from .language_model import MnemosForCausalLM
from .other_heads import MnemosForSeq2SeqLM, MnemosForSequenceClassification
from .pretrained_model import MODEL_TYPE, MnemosConfig
from .remembering_model import REMEMBERING_TYPE, RememberingConfig, RememberingForCausalLM


def register() -> None:
    """Let `AutoConfig`, `AutoModelForCausalLM` and the other Auto classes load checkpoints of this library.

    Without it they load them with `trust_remote_code=True`, by the file that every checkpoint ships.
    """
    library = libraries.transformers()
    library.AutoConfig.register(MODEL_TYPE, MnemosConfig, exist_ok=True)
    library.AutoConfig.register(REMEMBERING_TYPE, RememberingConfig, exist_ok=True)
    models = (MnemosForCausalLM, MnemosForSeq2SeqLM, MnemosForSequenceClassification, RememberingForCausalLM)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for model in models:
        if model.auto_class == "AutoModelForCausalLM":  # Trainer shifts labels for these names in label smoothing
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model.config_class.model_type] = model.__name__
        getattr(library, model.auto_class).register(model.config_class, model, exist_ok=True)
        for package in _packages(library):
            vars(package).setdefault(model.__name__, model)


def _packages(library: Any) -> list[Any]:
    """The package transformers, in which `transformers serve` looks for a checkpoint's class by its name.

    Transformers 5.23 executes its `__init__` a second time (`processing_utils`), so serve holds another module object.
    """
    serve = (module for name, module in list(sys.modules.items()) if name.startswith("transformers.cli."))
    held = (vars(module).get("transformers") for module in serve)
    return [library, *(package for package in held if package is not None and package is not library)]


register()
