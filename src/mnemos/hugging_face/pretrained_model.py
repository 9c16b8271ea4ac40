"""What our models have in common as models of Transformers: configuration (as JSON), weights, saving, refusals."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mnemos import generators, libraries
from mnemos.atomic import write_text
from mnemos.config import ModelConfig, from_dict, to_dict
from mnemos.models.store import check_built_as
from mnemos.modes import plain_module
from mnemos.types import InputError

libraries.transformers()
from transformers import PreTrainedConfig, PreTrainedModel  # noqa: E402

MODEL_TYPE = "mnemos"
_SIZES = {  # names that other libraries read: the fields of our configurations that hold them
    "hidden_size": ("dim",),
    "num_hidden_layers": ("layers", "decoder_layers"),
    "num_attention_heads": ("num_heads",),
    "intermediate_size": ("mlp",),
}
CODE = "modeling_mnemos"  # the name of the module that a checkpoint ships
_READ = "_is_hf_initialized"  # what the library marks as read from a checkpoint, or initialised
_REFUSED = (
    *("position_ids", "inputs_embeds", "token_type_ids", "output_attentions", "output_hidden_states"),
    *("decoder_position_ids", "decoder_inputs_embeds", "cache_params"),
)
_SHIPPED = '''"""The models of this checkpoint are those of the library mnemos, which must be installed."""

try:
    from mnemos.hugging_face import MnemosConfig as MnemosConfig
    from mnemos.hugging_face import MnemosForCausalLM as MnemosForCausalLM
    from mnemos.hugging_face import MnemosForSeq2SeqLM as MnemosForSeq2SeqLM
    from mnemos.hugging_face import MnemosForSequenceClassification as MnemosForSequenceClassification
    from mnemos.hugging_face import RememberingConfig as RememberingConfig
    from mnemos.hugging_face import RememberingForCausalLM as RememberingForCausalLM
except ImportError as error:
    raise ImportError(
        f"this checkpoint needs the library mnemos ({error}); run: pip install '.[hf]' in a clone of it"
    ) from error
'''


def ship_an_import(cls: Any, auto_class: Any = "") -> None:
    """Nothing: a checkpoint ships a file that imports this library, not a copy of its source."""


class MnemosConfig(PreTrainedConfig):
    """The configuration of a model of this library in Transformers.

        MnemosConfig(model=mnemos.TransformerConfig(vocab_size=256, attention=mnemos.LinearConfig()))

    model: the model's configuration, or its JSON (`mnemos.config.to_dict`), which is what config.json holds. segment:
    the most tokens that are read at once by a model whose cuts are part of the computation (splits = "segments", such
    as Transformer-XL with a detached memory); other models are not cut. Other names are those of PreTrainedConfig.
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads and max_position_embeddings are read from `model`.
    Raises InputError for a model that is not registered, or settings that it does not have.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = [*libraries.CACHE_NAMES, "encoder_last_hidden_state"]
    register_for_auto_class = classmethod(ship_an_import)

    def __init__(
        self,
        model: ModelConfig | dict[str, Any] | None = None,
        segment: int = 1024,
        **named: Any,
    ) -> None:
        if model is None:  # Transformers makes empty ones, to see which settings differ from the default ones
            model = {"is": "transformer"}
        ours: Any = model if isinstance(model, ModelConfig) else from_dict(ModelConfig, model, "config.model")
        if ours.inputs not in ("tokens", "pairs"):
            raise InputError(
                f"MnemosConfig: expected a model of tokens, found {ours.name!r}, of {ours.inputs}; use mnemos.load"
            )
        if not isinstance(segment, int) or segment < 1:
            raise InputError(f"MnemosConfig.segment: expected at least 1 token, found {segment!r}; use 1024")
        for name in ("vocab_size", "max_position_embeddings", "tie_word_embeddings", *_SIZES):
            named.pop(name, None)  # of config.json: they are those of `model`
        named["is_encoder_decoder"] = ours.inputs == "pairs"
        self.model: dict[str, Any] = to_dict(ours)
        self.segment = segment
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            setattr(self, name, named.pop(name, None))
        self.vocab_size = getattr(ours, "vocab_size", 0)
        self.tie_word_embeddings = True  # where the model ties them; see MnemosPreTrainedModel
        for name, fields in _SIZES.items():
            setattr(self, name, next((getattr(ours, f) for f in fields if hasattr(ours, f)), None))
        if getattr(ours, "position", None) == "learned":
            self.max_position_embeddings = ours.max_length
        classes = getattr(getattr(ours, "head", None), "classes", 0)
        if classes and named.get("id2label") is None:
            named.setdefault("num_labels", classes)
        super().__init__(**named)

    def of_model(self) -> ModelConfig:
        """The configuration of the model itself."""
        config: ModelConfig = from_dict(ModelConfig, self.model, "config.model")
        return config


class MnemosPreTrainedModel(PreTrainedModel):
    """Base of the models: `model` is a model of this library, whose weights are saved as `model.*`."""

    config_class: Any = MnemosConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False
    auto_class = "AutoModel"
    register_for_auto_class = classmethod(ship_an_import)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model: Any = self._build(self.config.of_model())
        if isinstance(built := getattr(self.model, "config", None), ModelConfig):
            config.model = to_dict(built)  # classes of a new head, for example
        self._tied_weights_keys = find_tied(self)
        for part in (*self.model.modules(), *(x for _, x in _list_tensors(self.model))):
            # A decoder of Transformers marks its parts; where a checkpoint is read, what it lacks is still to be set.
            vars(part).pop(_READ, None)
        self.post_init()

    def _build(self, config: Any) -> Any:
        return config.build()

    @classmethod
    def of(cls, model: nn.Module, **named: Any) -> Any:
        """A trained model of this library, with its weights (the same tensors); named: of `MnemosConfig`.

        A compiled model is taken out of torch.compile. Raises InputError for a model with other tensors than its config
        builds, which could not be loaded.
        """
        model = plain_module(model, f"{cls.__name__}.of")
        config = getattr(model, "config", None)
        if not isinstance(config, ModelConfig):
            raise InputError(f"{cls.__name__}.of: expected a model of this library, found {type(model).__name__}")
        with generators.preserve():
            network = cls(MnemosConfig(model=config, **named))
        check_built_as(model, network.model, f"{cls.__name__}.of")
        network.model = model
        network._tied_weights_keys = find_tied(network)
        return network.train(model.training)

    @classmethod
    def get_init_context(cls, *given: Any, **named: Any) -> list[Any]:
        """As in Transformers, but on the CPU: stored caches hold tensors that are not in the state dict."""
        contexts = super().get_init_context(*given, **named)
        return [one for one in contexts if not isinstance(one, torch.device)]

    @classmethod
    def from_pretrained(cls, *given: Any, **named: Any) -> Any:
        """As in Transformers."""
        read = super().from_pretrained(*given, **named)
        model = read[0] if isinstance(read, tuple) else read
        if not getattr(model, "hf_device_map", None):
            model.model.to(model.device)  # what is not in the state dict follows
        for _, x in _list_tensors(model):
            # Some weights lie in a file's memory, at any address. They are copied to where PyTorch puts new ones: a
            # CPU's kernels add in another order at other addresses, so the model would differ from what was saved.
            if x.device.type == "cpu" and x.data_ptr() % 64:
                x.data = x.data.clone()
        return read

    def init_weights(self) -> None:
        """The models of this library initialise themselves when they are built."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Give all that a checkpoint lacks the values of a new model: a new head, and buffers that are not saved."""
        lacking = {name: x for name, x in _list_tensors(self.model) if not getattr(x, _READ, False)}
        if lacking:
            fresh = dict(_list_tensors(self._build(self.config.of_model())))
            for name, value in lacking.items():
                if name in fresh:
                    value.copy_(fresh[name])
                setattr(value, _READ, True)

    def get_input_embeddings(self) -> nn.Module:
        embedding = getattr(self.model, "embedding", None)  # a host of Transformers names its own
        return self.model.host.get_input_embeddings() if embedding is None else embedding

    def get_output_embeddings(self) -> nn.Module | None:
        """The head, where it is a linear map from hidden states to logits; else None."""
        head = getattr(self.model, "head", None)
        return head if isinstance(head, nn.Linear) else None

    def resize_token_embeddings(self, *given: Any, **named: Any) -> Any:
        """Refused: the vocabulary is a setting of the model."""
        raise InputError(
            "resize_token_embeddings: expected the model's vocabulary, found another; build it with that vocab_size"
        )

    def gradient_checkpointing_enable(self, *given: Any, **named: Any) -> None:
        """Refused: `mnemos.replay` saves more memory, and exactly."""
        raise InputError(
            "gradient checkpointing: expected layers of Transformers, found a model of mnemos; use mnemos.replay"
        )

    def save_pretrained(self, save_directory: Any, *given: Any, **named: Any) -> Any:
        """As in Transformers; the folder also gets the code that `trust_remote_code=True` loads."""
        if (plain := plain_module(self, "save_pretrained")) is not self:
            return plain.save_pretrained(save_directory, *given, **named)
        self.config.auto_map = {
            "AutoConfig": f"{CODE}.{type(self.config).__name__}",
            self.auto_class: f"{CODE}.{type(self).__name__}",
        }
        folder = Path(save_directory)
        if (given[0] if given else named.get("is_main_process", True)) and not folder.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / f"{CODE}.py", _SHIPPED)
        return super().save_pretrained(save_directory, *given, **named)

    @staticmethod
    def _refuse(named: Mapping[str, Any]) -> None:
        """Raise InputError for an argument that would change results elsewhere; others are ignored, as elsewhere."""
        for name in _REFUSED:
            if named.get(name) is not None and named[name] is not False:
                others = "; prompt tuning needs it: use LoRA" if name.endswith("inputs_embeds") else ""
                raise InputError(f"{name}: expected none for models of mnemos; leave it out{others}")


def _list_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def find_tied(model: nn.Module) -> dict[str, str]:
    """{name of a parameter: the first name of the same one}, with those that models of Transformers in it will tie."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    for prefix, part in model.named_modules():
        # While a checkpoint is read, they are tied at the end.
        if prefix and isinstance(part, PreTrainedModel):
            keys = part.get_expanded_tied_weights_keys(all_submodels=False)
            tied |= {f"{prefix}.{name}": f"{prefix}.{source}" for name, source in keys.items()}
    return tied
