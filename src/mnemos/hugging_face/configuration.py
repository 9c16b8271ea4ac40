"""`MnemosConfig`: the configuration of a model of this library in Transformers, with our own one as plain JSON."""

from typing import Any

from mnemos import libraries
from mnemos.config import ModelConfig, from_dict, to_dict
from mnemos.types import InputError

libraries.transformers()
from transformers import PreTrainedConfig  # noqa: E402

MODEL_TYPE = "mnemos"
_SIZES = {  # names that other libraries read: the fields of our configurations that hold them
    "hidden_size": ("dim",),
    "num_hidden_layers": ("layers", "decoder_layers"),
    "num_attention_heads": ("num_heads",),
    "intermediate_size": ("mlp",),
}


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

    def __init__(
        self,
        model: ModelConfig | dict[str, Any] | None = None,
        segment: int = 1024,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        decoder_start_token_id: int | None = None,
        **named: Any,
    ) -> None:
        if model is None:  # Transformers makes empty ones, to see which settings differ from the default ones
            model = {"is": "transformer"}
        found: Any = model if isinstance(model, ModelConfig) else from_dict(ModelConfig, model, "config.model")
        if found.inputs not in ("tokens", "pairs"):
            raise InputError(
                f"MnemosConfig: expected a model that reads tokens, found {found.name!r}, which reads {found.inputs}; "
                "load that one with mnemos.load"
            )
        if not isinstance(segment, int) or segment < 1:
            raise InputError(f"MnemosConfig.segment: expected at least 1 token, found {segment!r}; use 1024")
        for name in ("vocab_size", "max_position_embeddings", "tie_word_embeddings", *_SIZES):
            named.pop(name, None)  # of config.json: they are those of `model`
        named["is_encoder_decoder"] = found.inputs == "pairs"
        self.model: dict[str, Any] = to_dict(found)
        self.segment = segment
        self.pad_token_id, self.bos_token_id, self.eos_token_id = pad_token_id, bos_token_id, eos_token_id
        self.decoder_start_token_id = decoder_start_token_id
        self.vocab_size = getattr(found, "vocab_size", 0)
        self.tie_word_embeddings = True  # where the model ties them; see MnemosPreTrainedModel
        for name, fields in _SIZES.items():
            setattr(self, name, next((getattr(found, f) for f in fields if hasattr(found, f)), None))
        if getattr(found, "position", None) == "learned":
            self.max_position_embeddings = found.max_length
        classes = getattr(getattr(found, "head", None), "classes", 0)
        if classes and named.get("id2label") is None:
            named.setdefault("num_labels", classes)
        super().__init__(**named)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: a checkpoint ships a file that imports this library, not a copy of its source."""

    def of_model(self) -> ModelConfig:
        """The configuration of the model itself."""
        found: ModelConfig = from_dict(ModelConfig, self.model, "config.model")
        return found
