"""Architectures beside those of `hosts.ZOO`, small, with inputs: what the matrix of hosts adds to them."""

from collections.abc import Callable
from functools import partial

import torch
from decoder_models import FAMILIES, plain
from hosts import _SEQ, _SIZES, _TEXT, _VIT, Example, _hf, _images, _text, _timm
from torch import Tensor, nn

from mnemos import libraries


def _video(rows: int, seed: int) -> Example:
    generator = torch.Generator().manual_seed(seed)
    return Example((torch.randn(rows, 3, 4, 32, 32, generator=generator),))


def _mvit() -> nn.Module:
    libraries.torchvision()
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(2, 8, 8, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        MSBlockConfig(2, 8, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
        MSBlockConfig(2, 16, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 1, 1]),
    ]
    options = {"residual_pool": True, "residual_with_cls_embed": False, "rel_pos_embed": True, "proj_after_attn": True}
    return MViT((32, 32), 4, blocks, num_classes=5, **options)


def _whole_text(t: int) -> Callable[[int, int], Example]:
    """Texts of one length: with padding, Longformer's own gradients are not finite."""

    def make(rows: int, seed: int) -> Example:
        ids = torch.randint(5, 50, (rows, t), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        return Example((), {"input_ids": ids, "attention_mask": mask}, mask.bool())

    return make


def _waves(samples: int) -> Callable[[int, int], Example]:
    def make(rows: int, seed: int) -> Example:
        generator = torch.Generator().manual_seed(seed)
        return Example((torch.randn(rows, samples, generator=generator),))

    return make


def _spoken(frames: int) -> Callable[[int, int], Example]:
    def make(rows: int, seed: int) -> Example:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(5, 50, (rows, 6), generator=generator)
        return Example(
            (), {"input_features": torch.randn(rows, 8, frames, generator=generator), "decoder_input_ids": ids}
        )

    return make


def _padded_waves(rows: int, seed: int) -> Example:
    """Recordings of several lengths, with the mask that says so."""
    samples = 400
    generator = torch.Generator().manual_seed(seed)
    length = torch.tensor([samples, 290, 210, 350])[torch.arange(rows) % 4]
    valid = torch.arange(samples) < length[:, None]
    waves = torch.randn(rows, samples, generator=generator).where(valid, 0)
    return Example((), {"input_values": waves, "attention_mask": valid.long()}, _frames(length))


def _padded_speech(rows: int, seed: int) -> Example:
    """Recordings of several lengths, with the mask that says so, and texts for the decoder."""
    samples = 4000
    generator = torch.Generator().manual_seed(seed)
    valid = torch.arange(samples) < torch.tensor([samples, 2900, 2100, 3500])[torch.arange(rows) % 4, None]
    waves = torch.randn(rows, samples, generator=generator).where(valid, 0)
    ids = torch.randint(5, 50, (rows, 6), generator=generator)
    return Example((), {"input_values": waves, "attention_mask": valid.long(), "decoder_input_ids": ids})


def _patches(rows: int, seed: int) -> Example:
    """Patches with their row and column in front, some of padding, and texts for the decoder."""
    generator = torch.Generator().manual_seed(seed)
    valid = torch.arange(9) < torch.tensor([9, 6, 4, 8])[torch.arange(rows) % 4, None]
    place = torch.stack([torch.arange(9) // 3, torch.arange(9) % 3], -1).expand(rows, -1, -1)
    patches = torch.cat([place, torch.randn(rows, 9, 27, generator=generator)], -1) * valid[..., None]
    ids = torch.randint(5, 50, (rows, 6), generator=generator)
    return Example((), {"flattened_patches": patches, "attention_mask": valid.long(), "decoder_input_ids": ids})


def _pix2struct() -> nn.Module:
    library = libraries.transformers()
    sizes = {"hidden_size": 24, "d_ff": 20, "d_kv": 8, "dropout_rate": 0.0}
    text = {**sizes, "vocab_size": 60, "num_layers": 1, "num_heads": 3, "pad_token_id": 1}
    vision = {**sizes, "num_hidden_layers": 2, "num_attention_heads": 3, "seq_len": 16, "patch_embed_hidden_size": 27}
    config = library.Pix2StructConfig(text_config=text, vision_config=vision)
    return library.Pix2StructForConditionalGeneration(config)


def _frames(length: Tensor) -> Tensor:
    for kernel, stride in zip(_WAVE["conv_kernel"], _WAVE["conv_stride"], strict=True):
        length = (length - kernel) // stride + 1
    return torch.arange(int(length.max())) < length[:, None]


def _tower(name: str) -> Callable[[], nn.Module]:
    return _hf(name, **{**_SIZES, "image_size": 16, "patch_size": 4, "attention_dropout": 0.0})


def _pairs(rows: int, seed: int) -> Example:
    """Images and texts; `valid` would be of both, so no text is padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 50, (rows, 9), generator=generator)
    pixels = torch.randn(rows, 3, 16, 16, generator=generator)
    return Example((), {"input_ids": ids, "pixel_values": pixels})


def _two_towers(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        library = libraries.transformers()
        sizes = {**_SIZES, "attention_dropout": 0.0, "projection_dim": 12}
        text = {**sizes, "vocab_size": 60, "max_position_embeddings": 80, "pad_token_id": 1, "eos_token_id": 2}
        vision = {**sizes, "image_size": 16, "patch_size": 4}
        config = getattr(library, f"{name}Config")(text_config=text, vision_config=vision)
        return getattr(library, f"{name}Model")(config)

    return make


def _detr() -> nn.Module:
    library = libraries.transformers()
    backbone = library.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = library.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=24,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=20,
        decoder_ffn_dim=20,
        num_queries=5,
        dropout=0.0,
    )
    return library.DetrForObjectDetection(config)


def _masked_image(rows: int, seed: int) -> Example:
    """ViTMAE masks at random: given the noise, always the same patches."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(rows, 3, 16, 16, generator=generator)
    return Example((pixels,), {"noise": torch.linspace(0, 1, 16).expand(rows, -1)})


_TOY = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
_SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 12],
    "strides": [4, 2],
}
_SEGFORMER |= {"num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "patch_sizes": [7, 3], "decoder_hidden_size": 8}
_SEGFORMER |= {"classifier_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "drop_path_rate": 0.0, "num_labels": 5}
_SWIN2 = {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [1, 2], "num_heads": [2, 3], "window_size": 4}
_SWIN2 |= {"drop_path_rate": 0.0, "num_labels": 5}
_HIERA = {"image_size": [32, 32], "patch_size": [7, 7], "embed_dim": 12, "depths": [1, 2], "num_heads": [1, 2]}
_HIERA |= {"num_query_pool": 1, "masked_unit_size": [4, 4], "masked_unit_attention": [True, False], "num_labels": 5}
_HIERA |= {"drop_path_rate": 0.0}
_LONGFORMER = {**_TEXT, "attention_window": [4, 4], "sep_token_id": 4, "pad_token_id": 1}
_DEBERTA = {**_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
_MODERN = {**_SIZES, "vocab_size": 60, "max_position_embeddings": 80, "pad_token_id": 1, "local_attention": 6}
_MODERN |= {"global_attn_every_n_layers": 2, "eos_token_id": 2, "bos_token_id": 3, "cls_token_id": 3, "sep_token_id": 4}
_MODERN |= {"reference_compile": False}
_T5 = {"d_model": 24, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 3}
_T5 |= {"vocab_size": 60, "dropout_rate": 0.0, "decoder_start_token_id": 1, "pad_token_id": 1}
_SPEECH = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
_WAVE = {"conv_dim": (8, 8), "conv_kernel": (10, 4), "conv_stride": (5, 4)}
_WAVE2VEC = {
    **_SPEECH,
    **_WAVE,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
}
_WAVE2VEC |= {"attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0, "activation_dropout": 0.0}
_WAVE2VEC |= {"mask_time_prob": 0.0, "num_feat_extract_layers": 2, "feat_extract_norm": "layer"}
_WHISPER = {**_SEQ, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 20}
_MOONSHINE = {"hidden_size": 24, "intermediate_size": 20, "vocab_size": 60, "max_position_embeddings": 80}
_MOONSHINE |= {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 1, "pad_token_id": 1}
_MOONSHINE |= {"encoder_num_attention_heads": 3, "decoder_num_attention_heads": 3}
_DISTIL = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 20, "vocab_size": 60, "max_position_embeddings": 80}
_DISTIL |= {"dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 1}

MORE: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Example]]] = {
    "torchvision_vit": (lambda: _vision_transformer(), _images(16)),
    "torchvision_swin": (lambda: _torchvision_swin("SwinTransformerBlock", "PatchMerging"), _images(16)),
    "torchvision_swin2": (lambda: _torchvision_swin("SwinTransformerBlockV2", "PatchMergingV2"), _images(16)),
    "torchvision_maxvit": (lambda: _maxvit(), _images(32)),
    "torchvision_mvit": (_mvit, _video),
    "timm_dinov2": (_timm("vit_small_patch14_reg4_dinov2", **_TOY), _images(16)),
    "timm_naflexvit": (
        _timm("naflexvit_base_patch16_gap", embed_dim=24, depth=2, num_heads=3, patch_size=4),
        _images(16),
    ),
    "timm_eva": (_timm("eva02_tiny_patch14_224", **_TOY), _images(16)),
    "timm_beit": (_timm("beit_base_patch16_224", **_TOY), _images(16)),
    "timm_swin2": (
        _timm(
            "swinv2_tiny_window8_256",
            img_size=16,
            patch_size=2,
            window_size=4,
            embed_dim=12,
            depths=(1, 2),
            num_heads=(2, 3),
            drop_path_rate=0.0,
        ),
        _images(16),
    ),
    "timm_cait": (_timm("cait_xxs24_224", **_TOY, depth_token_only=1), _images(16)),
    "timm_xcit": (
        _timm("xcit_nano_12_p8_224", img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=3),
        _images(16),
    ),
    "timm_twins": (
        _timm("twins_svt_small", img_size=64, embed_dims=(8, 12, 16, 16), num_heads=(1, 2, 2, 2), wss=(4, 4, 2, 2)),
        _images(64),
    ),
    "timm_convit": (_timm("convit_tiny", **_TOY, local_up_to_layer=1), _images(16)),
    "timm_maxvit": (
        _timm("maxvit_rmlp_pico_rw_256", img_size=64, embed_dim=(32, 32, 32, 32), depths=(1, 1, 1, 1)),
        _images(64),
    ),
    "timm_coatnet": (
        _timm("coatnet_nano_rw_224", img_size=32, embed_dim=(32, 32, 32, 32), depths=(1, 1, 1, 1)),
        _images(32),
    ),
    "timm_hiera": (
        _timm(
            "hiera_tiny_224",
            img_size=(32, 32),
            embed_dim=12,
            num_heads=1,
            stages=(1, 2),
            q_pool=1,
            mask_unit_size=(4, 4),
            mask_unit_attn=(True, False),
        ),
        _images(32),
    ),
    "timm_mvit": (lambda: _timm_mvit(), _images(32)),
    "hf_dinov2": (_hf("Dinov2ForImageClassification", **_VIT), _images(16)),
    "hf_dinov2_registers": (
        _hf("Dinov2WithRegistersForImageClassification", **_VIT, num_register_tokens=3),
        _images(16),
    ),
    "hf_dinov3": (_hf("DINOv3ViTModel", **{**_VIT, "num_register_tokens": 2}), _images(16)),
    "hf_beit": (_hf("BeitForImageClassification", **_VIT, drop_path_rate=0.0), _images(16)),
    "hf_vit_msn": (_hf("ViTMSNForImageClassification", **_VIT), _images(16)),
    "hf_vit_mae": (
        _hf(
            "ViTMAEModel",
            **_VIT,
            mask_ratio=0.5,
            decoder_hidden_size=12,
            decoder_num_attention_heads=2,
            decoder_num_hidden_layers=1,
            decoder_intermediate_size=16,
        ),
        _masked_image,
    ),
    "hf_clip": (_two_towers("CLIP"), _pairs),
    "hf_clip_vision": (_tower("CLIPVisionModel"), _images(16)),
    "hf_siglip": (_two_towers("Siglip"), _pairs),
    "hf_detr": (_detr, _images(32)),
    "hf_swin2": (_hf("Swinv2ForImageClassification", **_SWIN2), _images(16)),
    "hf_segformer": (_hf("SegformerForImageClassification", **_SEGFORMER), _images(32)),
    "hf_hiera": (_hf("HieraForImageClassification", **_HIERA), _images(32)),
    "hf_xlm_roberta": (_hf("XLMRobertaModel", **_TEXT), _text(11)),
    "hf_camembert": (_hf("CamembertModel", **_TEXT), _text(11)),
    "hf_electra": (_hf("ElectraModel", **_TEXT, embedding_size=12), _text(11)),
    "hf_distilbert": (_hf("DistilBertModel", **_DISTIL), _text(11)),
    "hf_mpnet": (_hf("MPNetModel", **_TEXT), _text(11)),
    "hf_albert": (_hf("AlbertModel", **_TEXT, embedding_size=12), _text(11)),
    "hf_deberta": (_hf("DebertaModel", **_DEBERTA), _text(11)),
    "hf_deberta2": (_hf("DebertaV2Model", **_DEBERTA), _text(11)),
    "hf_modernbert": (_hf("ModernBertModel", **_MODERN), _text(11)),
    "hf_longformer": (_hf("LongformerModel", **_LONGFORMER), _whole_text(12)),
    "hf_t5": (_hf("T5Model", **_T5), _text(11, decoder=True)),
    "hf_mbart": (_hf("MBartModel", **_SEQ), _text(11, decoder=True)),
    "hf_pegasus": (_hf("PegasusModel", **_SEQ), _text(11, decoder=True)),
    "hf_whisper": (_hf("WhisperModel", **_WHISPER), _spoken(24)),
    "hf_wav2vec2": (_hf("Wav2Vec2Model", **_WAVE2VEC), _padded_waves),
    "hf_hubert": (_hf("HubertModel", **_WAVE2VEC), _waves(400)),
    "hf_moonshine": (_hf("MoonshineModel", **_MOONSHINE), _padded_speech),
    "hf_pix2struct": (_pix2struct, _patches),
}

# Causal decoders: a token reads what earlier blocks of its row have written.
DECODERS = {
    f"hf_{name}": (partial(plain, name, vocab_size=60), _text(11)) for name in (*FAMILIES, "Gemma", "Phi3", "Olmo2")
}


def _timm_mvit() -> nn.Module:
    libraries.timm()
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    cfg = MultiScaleVitCfg(depths=(1, 2), embed_dim=12, stride_q=((1, 1), (2, 2)), stride_kv_adaptive=(2, 2))
    return MultiScaleVit(cfg, img_size=32, num_classes=5)


def _vision_transformer() -> nn.Module:
    libraries.torchvision()
    from torchvision.models import VisionTransformer

    return VisionTransformer(16, 4, 2, 3, 24, 20, num_classes=5)


def _torchvision_swin(block: str, merging: str) -> nn.Module:
    libraries.torchvision()
    from torchvision.models import swin_transformer as swin

    parts = {"block": getattr(swin, block), "downsample_layer": getattr(swin, merging)}
    sizes = {"patch_size": [2, 2], "embed_dim": 12, "depths": [1, 2], "num_heads": [2, 3], "window_size": [4, 4]}
    return swin.SwinTransformer(**sizes, **parts, num_classes=5, stochastic_depth_prob=0.0)


def _maxvit() -> nn.Module:
    libraries.torchvision()
    from torchvision.models import MaxVit

    return MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 8, 0.0, num_classes=5)
