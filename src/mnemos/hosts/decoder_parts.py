"""The parts of a causal decoder that is not ours: embedding, decoder, head, and what the model does after its head."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.modes import evaluating
from mnemos.types import InputError

# Decoders of transformers whose logits are those of their head, but for `AfterHead`: class, and where its decoder is.
_LLAMAS = (
    "Llama Mistral Mixtral Ministral Qwen2 Qwen2Moe Qwen3 Qwen3Moe Gemma Gemma2 Gemma3 Phi Phi3 Olmo Olmo2 SmolLM3 "
    "Granite Glm4 Starcoder2 Cohere Cohere2"
)
KNOWN = {"GPT2LMHeadModel": "transformer", "GPTNeoXForCausalLM": "gpt_neox", "OPTForCausalLM": "model"}
KNOWN |= {"FalconForCausalLM": "transformer"}
KNOWN |= {f"{name}ForCausalLM": "model" for name in _LLAMAS.split()}
PARTS = "remember(model, embedding=..., decoder=..., head=...)"


class AfterHead(NamedTuple):
    """What a model does with the logits of its head: times `scale` (Cohere, Granite), then a soft cap (Gemma)."""

    scale: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(model: nn.Module) -> "AfterHead":
        """As the configuration of a model of transformers has it."""
        config = getattr(model, "config", None)
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        scale = float(scale) if isinstance(scale, int | float) else 1.0
        return AfterHead(scale, getattr(config, "final_logit_softcapping", None))

    def __call__(self, logits: Tensor) -> Tensor:
        """The model's logits of those of its head."""
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether logits are equal but for rounding."""
    rounding = max(torch.finfo(x.dtype).eps, torch.finfo(y.dtype).eps)
    return bool((x - y).abs().max() <= min(100 * rounding, 0.05) * y.abs().max())


def spread(embedding: Any) -> Tensor:
    """The standard deviation of what an embedding gives for tokens: some scale their weights (Gemma 3, Bart)."""
    weight = embedding.weight
    some = torch.arange(min(256, len(weight)), device=weight.device)
    scale = embedding(some).float().norm() / weight[some].float().norm().clamp(min=1e-30)
    return weight.float().std() * scale


def after_head(model: nn.Module, embedding: Any, head: nn.Module, hidden: Callable[[Tensor], Tensor]) -> AfterHead:
    """What a model does with the logits of its head. Raises InputError unless its parts, with it, give its logits.

    hidden: the decoder's hidden states [B, n, D] of embeddings. Both are compared on eight tokens. A model that is not
    called itself, without a forward, does nothing.
    """
    if type(model).forward is nn.Module.forward:
        return AfterHead()
    found, rows = type(model).__name__, len(embedding.weight)
    ids = ((rows // 2 + torch.arange(8)) % rows).view(2, 4).to(embedding.weight.device)
    with torch.no_grad(), generators.kept(), evaluating(model):
        try:
            whole: Any = model(ids)
        except Exception as error:  # of any class: it is the model's own
            raise InputError(
                "remember: expected a model that is called with token ids [B, T], to compare its logits with those of "
                f"its parts, found {type(error).__name__}: {' '.join(str(error).split())}; use another model"
            ) from error
        whole = whole[0] if isinstance(whole, tuple) else getattr(whole, "logits", whole)
        logits = head(hidden(embedding(ids)))
        if not isinstance(whole, Tensor) or whole.shape != logits.shape:
            shape = tuple(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
            raise InputError(
                f"remember: expected parts whose logits are those of {found}, found {tuple(logits.shape)} and {shape}; "
                "name other parts"
            )
        for after in (AfterHead.of(model), AfterHead()):  # in half precision rounding may hide a cap
            if _same(after(logits), whole):
                return after
    logits, whole = logits.float(), whole.float()
    factor = (logits * whole).sum() / logits.square().sum()
    said = f"that they differ by up to {(logits - whole).abs().max():.2g}"
    if factor != 0 and _same(logits * factor, whole):
        said = f"that {found} multiplies them by {factor:.4g}"
    raise InputError(
        f"remember: expected parts whose logits are those of {found}, found {said}; name parts that include all that "
        "it computes, or use a model whose layout is known"
    )


def _with_head(name: str) -> str | None:
    """The known class that has a decoder of the class `name` and a head, such as GPT2LMHeadModel of GPT2Model."""
    stem = name.removesuffix("Model")
    return next((known for known in (f"{stem}LMHeadModel", f"{stem}ForCausalLM") if known in KNOWN), None)


def known_parts(model: nn.Module) -> list[nn.Module]:
    """The embedding, the decoder and the head of a known class. Raises InputError for another."""
    for cls in type(model).__mro__:
        if cls.__module__.startswith("transformers.") and cls.__name__ in KNOWN:
            of_library: Any = model
            return [
                of_library.get_input_embeddings(),
                model.get_submodule(KNOWN[cls.__name__]),
                of_library.get_output_embeddings(),
            ]
    if (whole := _with_head(type(model).__name__)) is not None:
        raise InputError(
            f"remember: expected a decoder with its head, found {type(model).__name__}, which returns hidden states "
            f"and no logits; use {whole}"
        )
    raise InputError(
        f"remember: expected a causal decoder whose layout is known ({', '.join(sorted(KNOWN))}), found "
        f"{type(model).__name__}; name its parts: {PARTS}"
    )


def named_part(model: nn.Module, name: str) -> nn.Module:
    """The part of a model with a name. Raises InputError if it has none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = ", ".join(name for name, _ in model.named_children())
        raise InputError(
            f"remember: expected the name of a part of {type(model).__name__}, found {name!r}; it has {known}"
        ) from None
