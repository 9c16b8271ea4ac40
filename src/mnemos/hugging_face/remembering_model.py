"""A decoder of Transformers with memory tokens (`mnemos.remember`) as one of its models: generated from and saved.

At the end all our models are registered under the Auto classes of Transformers.
"""

import copy
import sys
from typing import Any

from torch import nn

from mnemos import generators, libraries
from mnemos.hosts.attach import CONFIG_RECORDS
from mnemos.hosts.linearise import list_linearised
from mnemos.hosts.pretrained import apply_record, apply_states, find_record
from mnemos.hosts.remembering import Remembering, Segmented, remember
from mnemos.modes import plain_module
from mnemos.types import InputError

from .pretrained_heads import MnemosForCausalLM, MnemosForSeq2SeqLM, MnemosForSequenceClassification
from .pretrained_model import MODEL_TYPE, MnemosConfig, find_tied, ship_an_import

libraries.transformers()
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig  # noqa: E402

REMEMBERING_TYPE = "mnemos-remembering"


class RememberingConfig(PreTrainedConfig):
    """The configuration of a decoder with memory tokens.

    host: the decoder's configuration as JSON (`config.to_dict()`), with the settings of its gated caches and of what is
    linearised; tokens: m, the memory tokens; segment: L, the tokens of a segment, after which the memory is written.
    """

    model_type = REMEMBERING_TYPE
    keys_to_ignore_at_inference = list(libraries.CACHE_NAMES)
    register_for_auto_class = classmethod(ship_an_import)

    def __init__(self, host: dict[str, Any] | None = None, tokens: int = 16, segment: int = 128, **named: Any) -> None:
        # Transformers makes empty ones, to see which settings differ from the default ones.
        self.host = dict(host or {"model_type": "gpt2"})
        self.host.pop("_name_or_path", None)  # where this machine had it
        self.tokens, self.segment = tokens, segment
        decoder = self.of_host()
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            named.pop(name, None)
            setattr(self, name, getattr(decoder, name, None))
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(self, name, named.pop(name, getattr(decoder, name, None)))
        named.pop("tie_word_embeddings", None)
        self.tie_word_embeddings = True  # where the host ties them
        super().__init__(**named)

    def of_host(self) -> Any:
        """The decoder's configuration."""
        named = dict(self.host)
        return AutoConfig.for_model(named.pop("model_type"), **named)

    def note_changes(self, model: nn.Module) -> None:
        """Note what `mnemos.cache` and `linearise` did to the decoder, given the decoder itself or `model`."""
        for name, record in zip(CONFIG_RECORDS, (find_record(model), list_linearised(model)), strict=True):
            self.host.pop(name, None)
            self.__dict__.pop(name, None)
            if record:
                self.host[name] = record

    def of_model(self) -> "RememberingConfig":
        """What the model is built from: this configuration."""
        return self


class RememberingForCausalLM(MnemosForCausalLM):
    """A causal decoder of Transformers with memory tokens, over segments of any length of text.

        remembering = mnemos.remember(model, tokens=16)                              # trained with mnemos.replay
        network = RememberingForCausalLM.of(remembering, segment=128)
        network.generate(ids, attention_mask=mask, num_beams=4, max_new_tokens=500)  # the memory is written as it goes
        network.save_pretrained(folder)

    It is called as `MnemosForCausalLM`; `network.model` is a `mnemos.hosts.Segmented`, `network.remembering` the
    wrapper, and `network.remembering.model` the decoder, one whose layout is known. Weights and settings are saved, and
    read by `AutoModelForCausalLM`, with the decoder's gated caches and states, which begin anew in every segment.
    """

    config_class = RememberingConfig

    def _build(self, config: Any) -> Any:
        host = AutoModelForCausalLM.from_config(config.of_host(), trust_remote_code=False)
        caches, states = map(config.host.get, CONFIG_RECORDS)
        if caches:
            apply_record(host, caches, "RememberingConfig", "config.json")
        apply_states(host, states or [], "RememberingConfig")
        return Segmented(remember(host, config.tokens), config.segment)

    def save_pretrained(self, save_directory: Any, *given: Any, **named: Any) -> Any:
        """As in Transformers, with the settings of the decoder's gated caches and states."""
        self.config.note_changes(self)
        return super().save_pretrained(save_directory, *given, **named)

    @property
    def remembering(self) -> Remembering:
        """What `mnemos.remember` returned."""
        wrapper: Remembering = self.model.remembering
        return wrapper

    @classmethod
    def of(cls, model: nn.Module, **named: Any) -> Any:
        """A decoder that `mnemos.remember` was called on, with its weights; named: segment (128), and of the config."""
        model = plain_module(model, "RememberingForCausalLM.of")
        if not isinstance(model, Remembering) or not hasattr(model.model, "config"):
            raise InputError(
                f"RememberingForCausalLM.of: expected what mnemos.remember returns for a model of Transformers, found "
                f"{type(model).__name__}"
            )
        host: Any = model.model
        config = RememberingConfig(host=host.config.to_dict(), tokens=len(model.memory.start), **named)
        config.note_changes(model)
        with generators.preserve():
            network = cls(config)
        network.model = Segmented(model, config.segment)
        network._tied_weights_keys = find_tied(network)
        network.generation_config = copy.deepcopy(host.generation_config)
        return network.train(host.training)


def register() -> None:
    """Let `AutoConfig`, `AutoModelForCausalLM` and the other Auto classes load checkpoints of this library.

    Without it they load them with `trust_remote_code=True`, by the file that every checkpoint ships.
    """
    library = libraries.transformers()
    library.AutoConfig.register(MODEL_TYPE, MnemosConfig, exist_ok=True)
    library.AutoConfig.register(REMEMBERING_TYPE, RememberingConfig, exist_ok=True)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # `transformers serve` looks for a checkpoint's class by its name in the package. Transformers 5.23 executes its
    # `__init__` a second time (`processing_utils`), so serve has another module object.
    serve = (module for name, module in list(sys.modules.items()) if name.startswith("transformers.cli."))
    packages = [library, *(package for module in serve if (package := vars(module).get("transformers")) is not None)]
    for model in (MnemosForCausalLM, MnemosForSeq2SeqLM, MnemosForSequenceClassification, RememberingForCausalLM):
        if model.auto_class == "AutoModelForCausalLM":  # Trainer shifts labels for these names in label smoothing
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model.config_class.model_type] = model.__name__
        getattr(library, model.auto_class).register(model.config_class, model, exist_ok=True)
        for package in packages:
            vars(package).setdefault(model.__name__, model)


register()
