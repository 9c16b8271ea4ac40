"""Every host that a gated cache goes into, small, with inputs: what the tests of this room run over."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mnemos
from mnemos import GRC, libraries
from mnemos.memory.gated_cache import caches

# Families of hosts whose forwards differ, for tests that would take too long over all.
FEW = ("torch_encoder", "timm_vit", "hf_pvt", "hf_bert", "hf_bigbird", "hf_reformer")


def few(names: Iterable[str]) -> list[Any]:
    """Parameters of a test over hosts: those of FEW in every run, the others in `make exhaustive` alone."""
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


@dataclass(frozen=True)
class Example:
    """One call of a model; `valid` [B, T] says which positions of the output mean something (None: all)."""

    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    valid: Tensor | None = None
    batch: int = 0  # the dimension of the batch

    def rows(self, start: int, stop: int) -> "Example":
        """The same of some rows alone."""

        def cut(x: Any, dim: int) -> Any:
            return x.narrow(dim, start, stop - start) if isinstance(x, Tensor) else x

        args = tuple(cut(x, self.batch) for x in self.args)
        if len({id(x) for x in self.args}) < len(args):  # one tensor as query, key and value stays one
            args = (args[0],) * len(args)
        kwargs = {name: cut(value, 0) for name, value in self.kwargs.items()}
        return Example(args, kwargs, None if self.valid is None else cut(self.valid, 0), self.batch)

    def to(self, dtype: torch.dtype) -> "Example":
        """The same with floats of another type."""
        every = (*self.args, *self.kwargs.values())
        cast = {id(x): x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in every}
        kwargs = {name: cast[id(x)] for name, x in self.kwargs.items()}
        return Example(tuple(cast[id(x)] for x in self.args), kwargs, self.valid, self.batch)


def tensor(output: Any) -> Tensor:
    """The tensor that matters in what a model returns."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return output[0]
    for name in ("logits", "logits_per_image"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return output.last_hidden_state


def run(model: Any, example: Example) -> Tensor:
    """A model's output at the positions that mean something."""
    torch.manual_seed(0)  # Reformer hashes at random
    found = tensor(model(*example.args, **example.kwargs))
    return found if example.valid is None else found[example.valid]


def loss(model: Any, example: Example) -> Tensor:
    """A scalar of all of it, summed over rows."""
    found = run(model, example)
    weight = torch.linspace(-1, 1, found.shape[-1], dtype=found.dtype)
    return (found * weight).sum() + found.square().sum() / 2


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def words(seed: int, *shape: int) -> Tensor:
    return torch.randint(5, 50, shape, generator=torch.Generator().manual_seed(seed))


def images(side: int) -> Callable[[int, int], Example]:
    return lambda rows, seed: Example((normal(seed, rows, 3, side, side),))


def lengths(rows: int, t: int) -> Tensor:
    """How many tokens of each row are valid."""
    return torch.tensor([(t, t - 3, 4, t - 1, 7, t, 3, 5)[i % 8] for i in range(rows)])


def text(t: int, decoder: bool = False) -> Callable[[int, int], Example]:
    def make(rows: int, seed: int) -> Example:
        valid = torch.arange(t) < lengths(rows, t)[:, None]
        kwargs = {"input_ids": words(seed, rows, t).where(valid, 1), "attention_mask": valid.long()}
        if decoder:
            kwargs["decoder_input_ids"] = words(seed, rows, 6)
        return Example((), kwargs, None if decoder else valid)

    return make


def _sequences(t: int, padded: bool = False, time_first: bool = False, thrice: bool = False) -> Any:
    """Where time leads, outputs at padding are compared too."""

    def make(rows: int, seed: int) -> Example:
        x = normal(seed, *((t, rows) if time_first else (rows, t)), 12)
        valid = torch.arange(t) < lengths(rows, t)[:, None] if padded else None
        name = "key_padding_mask" if thrice else "src_key_padding_mask"
        kwargs = {} if valid is None else {name: ~valid}
        return Example((x,) * (3 if thrice else 1), kwargs, None if time_first else valid, int(time_first))

    return make


def _encoder(**more: Any) -> nn.Module:
    options = {"dropout": 0.0, "batch_first": True, **more}
    layer = nn.TransformerEncoderLayer(12, 2, 16, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options.get("norm_first"))


def _mha() -> nn.Module:
    return nn.MultiheadAttention(12, 2, batch_first=True)


def timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: libraries.timm().create_model(name, num_classes=5, **options)


SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def hf(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A model by the name of its class; `eager=True` is attention written out."""

    def make() -> nn.Module:
        library = libraries.transformers()
        config = getattr(library, next(n for n in _configs(name) if hasattr(library, n)))
        return getattr(library, name)(config(**options))

    return make


def _configs(name: str) -> list[str]:
    return [f"{name.removesuffix(end)}Config" for end in ("ForImageClassification", "ForMaskedLM", "Model")]


VIT = {**SIZES, **_STILL, "image_size": 16, "patch_size": 4, "num_labels": 5}
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [1, 2], "num_heads": [2, 3], "window_size": 4}
_SWIN |= {"drop_path_rate": 0.0}
_PYRAMID = {"image_size": 32, "hidden_sizes": [8, 12], "depths": [1, 1], "num_attention_heads": [1, 2]}
_PYRAMID |= {"num_encoder_blocks": 2, "patch_sizes": [4, 2], "strides": [4, 2], "sequence_reduction_ratios": [2, 1]}
_PYRAMID |= {"mlp_ratios": [2, 2], "num_labels": 5}
_PVT2 = {**_PYRAMID, "sr_ratios": [2, 1], "patch_sizes": [7, 3]}
TEXT = {**SIZES, **_STILL, "vocab_size": 60, "max_position_embeddings": 80, "pad_token_id": 1}
_SPARSE = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1, "sep_token_id": 4}
LAYERS = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 3, "dropout": 0.0}
LAYERS |= {"decoder_attention_heads": 3, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20}
SEQ = {**LAYERS, "vocab_size": 60, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
SEQ |= {"max_position_embeddings": 80}
_REFORMER = {"is_decoder": False, "hidden_size": 24, "num_attention_heads": 3, "attention_head_size": 8}
_REFORMER |= {"feed_forward_size": 20, "axial_pos_shape": [4, 8], "axial_pos_embds_dim": [12, 12], "num_buckets": 4}
_REFORMER |= {"attn_layers": ["lsh", "local"], "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8}
_REFORMER |= {"vocab_size": 60, "hidden_dropout_prob": 0.0, "lsh_attention_probs_dropout_prob": 0.0}
_REFORMER |= {"local_attention_probs_dropout_prob": 0.0, "pad_token_id": 1, "hash_seed": 0}
_EAGER = {"attn_implementation": "eager"}
_TIMM_VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
_TIMM_SWIN = {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (1, 2), "num_heads": (2, 3)}
_TIMM_SWIN |= {"drop_path_rate": 0.0}
_TIMM_PVT = {"depths": (1, 1, 1, 1), "embed_dims": (8, 12, 16, 16), "num_heads": (1, 2, 2, 4), "mlp_ratios": (2,) * 4}

ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Example]]] = {
    "torch_encoder": (_encoder, _sequences(9)),
    "torch_padded": (_encoder, _sequences(9, padded=True)),
    "torch_time_first": (
        lambda: _encoder(batch_first=False, norm_first=True),
        _sequences(9, padded=True, time_first=True),
    ),
    "torch_mha": (_mha, _sequences(9, padded=True, thrice=True)),
    "timm_vit": (timm("vit_tiny_patch16_224", **_TIMM_VIT), images(16)),
    "timm_swin": (timm("swin_tiny_patch4_window7_224", **_TIMM_SWIN), images(16)),
    "timm_pvt2": (timm("pvt_v2_b0", **_TIMM_PVT), images(64)),
    "timm_pvt2_pooled": (timm("pvt_v2_b2_li", **_TIMM_PVT), images(64)),
    "hf_vit": (hf("ViTForImageClassification", **VIT), images(16)),
    "hf_vit_eager": (hf("ViTForImageClassification", **VIT, **_EAGER), images(16)),
    "hf_deit": (hf("DeiTForImageClassification", **VIT), images(16)),
    "hf_swin": (hf("SwinForImageClassification", **_SWIN), images(16)),
    "hf_pvt": (hf("PvtForImageClassification", **_PYRAMID), images(32)),
    "hf_pvt2": (hf("PvtV2ForImageClassification", **_PVT2), images(32)),
    "hf_pvt2_pooled": (hf("PvtV2ForImageClassification", **_PVT2, linear_attention=True), images(32)),
    "hf_bert": (hf("BertModel", **TEXT), text(11)),
    "hf_bert_eager": (hf("BertModel", **TEXT, **_EAGER), text(11)),
    "hf_roberta": (hf("RobertaModel", **TEXT), text(11)),
    "hf_bigbird": (hf("BigBirdModel", **TEXT, **_SPARSE), text(40)),
    "hf_bigbird_short": (hf("BigBirdModel", **TEXT, **_SPARSE), text(11)),  # falls back to dense attention
    "hf_reformer": (hf("ReformerModel", **_REFORMER), text(32)),
    "hf_marian": (hf("MarianModel", **SEQ), text(11, decoder=True)),
    "hf_bart": (hf("BartModel", **SEQ), text(11, decoder=True)),
    "hf_bart_eager": (hf("BartModel", **SEQ, **_EAGER), text(11, decoder=True)),
}
MODELS = dict(ZOO)  # all that `build` and `example` know: `matrix` adds its own, which must not join the tests over ZOO
_built: dict[str, nn.Module] = {}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A fresh host, the same at every call, in eval mode: in double precision, with weights that do something."""
    if name not in _built:
        torch.manual_seed(0)
        model = MODELS[name][0]()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        _built[name] = model.eval()
    return copy.deepcopy(_built[name]).to(dtype)


def example(name: str, rows: int = 3, seed: int = 2, dtype: torch.dtype = torch.float64) -> Example:
    """An input of a host."""
    return MODELS[name][1](rows, seed).to(dtype)


def given(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """What `cache` has to be told of a host that does not say how large its images are."""
    return {"example": example(name, 1, dtype=dtype).args} if name.startswith("timm_pvt2") else {}


def cached(name: str, preset: str = "mnemos", dtype: torch.dtype = torch.float64, **switches: Any) -> nn.Module:
    """The host in eval mode with caches that hold something, and open gates."""
    model = build(name, dtype)
    torch.manual_seed(4)
    mnemos.cache(model, GRC(**{"preset": preset, "length": 4, **switches}), **given(name, dtype))
    open_caches(model)
    return model


def state(model: nn.Module) -> dict[str, Any]:
    """All that a model has and is: names and identities of parameters, hooks, attributes of every module."""
    found: dict[str, Any] = {"keys": list(model.state_dict())}
    for name, module in model.named_modules():
        attributes = {key for key in module.__dict__ if not key.startswith("_")}
        hooks = {key: dict(value) for key, value in module.__dict__.items() if key.endswith("_hooks")}
        plain = {key: value for key, value in module.__dict__.items() if isinstance(value, (bool, int, float, str))}
        plain = {key: value for key, value in plain.items() if not key.endswith("_seed")}  # drawn at every forward
        found[name] = attributes, set(module.__dict__), hooks, plain, list(module._modules), module.training
        config = getattr(module, "config", None)
        if config is not None:
            found[f"{name}.config"] = config.to_dict()
    return found


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Equal to rounding, in double precision."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def open_caches(model: nn.Module, seed: int = 5) -> None:
    """Give the branches of a cached model weights, gates and contents that do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for branch in caches(model):
            for value in (*branch.parameters(), branch.cache):
                value += 0.3 * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
            branch.mix += 1.5


def twice(name: str) -> nn.Module:
    """The first attention is cached in one way, which is never written, and the others in another."""
    model, grc = build(name), GRC(length=4, write=False)
    first = mnemos.cache(build(name), GRC(length=3), **given(name)).swapped[0].name
    torch.manual_seed(0)
    mnemos.cache(model, grc, where=first, **given(name))
    mnemos.cache(model, GRC(preset="paper", length=3, ratio=0.34), **given(name))
    open_caches(model)
    return model
