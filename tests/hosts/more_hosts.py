"""Architectures beside those of `hosts.ZOO`, small, with inputs: what the matrix of hosts adds to them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from decoder_models import FAMILIES, plain
from hosts import LAYERS, SEQ, SIZES, TEXT, VIT, Example, hf, images, normal, text, timm, words
from torch import nn

from mnemos import libraries


def _torchvision(name: str, *sizes: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(libraries.torchvision().models, name)(*sizes, num_classes=5, **options)


def _torchvision_swin(block: str, merging: str) -> nn.Module:
    swin = libraries.torchvision().models.swin_transformer
    parts = {"block": getattr(swin, block), "downsample_layer": getattr(swin, merging)}
    sizes = {"patch_size": [2, 2], "embed_dim": 12, "depths": [1, 2], "num_heads": [2, 3], "window_size": [4, 4]}
    return swin.SwinTransformer(**sizes, **parts, num_classes=5, stochastic_depth_prob=0.0)


def _mvit() -> nn.Module:
    mvit = libraries.torchvision().models.video.mvit
    blocks = [
        mvit.MSBlockConfig(2, 8, 8, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        mvit.MSBlockConfig(2, 8, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
        mvit.MSBlockConfig(2, 16, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 1, 1]),
    ]
    options = {"residual_pool": True, "residual_with_cls_embed": False, "rel_pos_embed": True, "proj_after_attn": True}
    return mvit.MViT((32, 32), 4, blocks, num_classes=5, **options)


def _timm_mvit() -> nn.Module:
    mvit = libraries.timm().models.mvitv2
    cfg = mvit.MultiScaleVitCfg(depths=(1, 2), embed_dim=12, stride_q=((1, 1), (2, 2)), stride_kv_adaptive=(2, 2))
    return mvit.MultiScaleVit(cfg, img_size=32, num_classes=5)


def _unpadded(rows: int, seed: int) -> Example:
    """With padding, Longformer's own gradients are not finite."""
    mask = torch.ones(rows, 12, dtype=torch.long)
    return Example((), {"input_ids": words(seed, rows, 12), "attention_mask": mask}, mask.bool())


def _spoken(rows: int, seed: int) -> Example:
    return Example((), {"input_features": normal(seed, rows, 8, 24), "decoder_input_ids": words(seed, rows, 6)})


def _padded_waves(rows: int, seed: int) -> Example:
    """Recordings of several lengths, with the mask that says so."""
    length = torch.tensor([400, 290, 210, 350])[torch.arange(rows) % 4]
    valid = torch.arange(400) < length[:, None]
    waves = normal(seed, rows, 400).where(valid, 0)
    for kernel, stride in zip(_WAVE["conv_kernel"], _WAVE["conv_stride"], strict=True):
        length = (length - kernel) // stride + 1
    frames = torch.arange(int(length.max())) < length[:, None]
    return Example((), {"input_values": waves, "attention_mask": valid.long()}, frames)


def _padded_speech(rows: int, seed: int) -> Example:
    """Recordings of several lengths, with the mask that says so, and texts for the decoder."""
    valid = torch.arange(4000) < torch.tensor([4000, 2900, 2100, 3500])[torch.arange(rows) % 4, None]
    kwargs = {"input_values": normal(seed, rows, 4000).where(valid, 0), "attention_mask": valid.long()}
    return Example((), {**kwargs, "decoder_input_ids": words(seed, rows, 6)})


def _patches(rows: int, seed: int) -> Example:
    """Patches with their row and column in front, some of padding, and texts for the decoder."""
    valid = torch.arange(9) < torch.tensor([9, 6, 4, 8])[torch.arange(rows) % 4, None]
    place = torch.stack([torch.arange(9) // 3, torch.arange(9) % 3], -1).expand(rows, -1, -1)
    patches = torch.cat([place, normal(seed, rows, 9, 27)], -1) * valid[..., None]
    kwargs = {"flattened_patches": patches, "attention_mask": valid.long(), "decoder_input_ids": words(seed, rows, 6)}
    return Example((), kwargs)


def _pix2struct() -> nn.Module:
    library = libraries.transformers()
    sizes = {"hidden_size": 24, "d_ff": 20, "d_kv": 8, "dropout_rate": 0.0}
    text = {**sizes, "vocab_size": 60, "num_layers": 1, "num_heads": 3, "pad_token_id": 1}
    vision = {**sizes, "num_hidden_layers": 2, "num_attention_heads": 3, "seq_len": 16, "patch_embed_hidden_size": 27}
    config = library.Pix2StructConfig(text_config=text, vision_config=vision)
    return library.Pix2StructForConditionalGeneration(config)


def _tower(name: str) -> Callable[[], nn.Module]:
    return hf(name, **{**SIZES, "image_size": 16, "patch_size": 4, "attention_dropout": 0.0})


def _pairs(rows: int, seed: int) -> Example:
    """Images and texts; `valid` would be of both, so no text is padded."""
    return Example((), {"input_ids": words(seed, rows, 9), "pixel_values": normal(seed, rows, 3, 16, 16)})


def _two_towers(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        library = libraries.transformers()
        sizes = {**SIZES, "attention_dropout": 0.0, "projection_dim": 12}
        text = {**sizes, "vocab_size": 60, "max_position_embeddings": 80, "pad_token_id": 1, "eos_token_id": 2}
        vision = {**sizes, "image_size": 16, "patch_size": 4}
        config = getattr(library, f"{name}Config")(text_config=text, vision_config=vision)
        return getattr(library, f"{name}Model")(config)

    return make


def _detr() -> nn.Module:
    library = libraries.transformers()
    layers = {"hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic", "out_features": ["stage2"]}
    backbone = library.ResNetConfig(embedding_size=8, **layers)
    own = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 5}
    return library.DetrForObjectDetection(library.DetrConfig(**LAYERS, **own, backbone_config=backbone))


def _masked_image(rows: int, seed: int) -> Example:
    """ViTMAE masks at random: given the noise, always the same patches."""
    return Example((normal(seed, rows, 3, 16, 16),), {"noise": torch.linspace(0, 1, 16).expand(rows, -1)})


_TOY = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
_NAFLEX = {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 4}
_XCIT = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
_SEGFORMER = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 12]}
_SEGFORMER |= {"num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "patch_sizes": [7, 3], "decoder_hidden_size": 8}
_SEGFORMER |= {"classifier_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "drop_path_rate": 0.0, "num_labels": 5}
_SEGFORMER |= {"strides": [4, 2]}
_SWIN2 = {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [1, 2], "num_heads": [2, 3], "window_size": 4}
_SWIN2 |= {"drop_path_rate": 0.0, "num_labels": 5}
_TIMM_SWIN2 = {"img_size": 16, "patch_size": 2, "embed_dim": 12, "depths": (1, 2), "num_heads": (2, 3)}
_TIMM_SWIN2 |= {"drop_path_rate": 0.0, "window_size": 4}
_TWINS = {"img_size": 64, "embed_dims": (8, 12, 16, 16), "num_heads": (1, 2, 2, 2), "wss": (4, 4, 2, 2)}
_TWINS |= {"depths": (1, 2, 1, 1)}
_TIMM_HIERA = {"img_size": (32, 32), "embed_dim": 12, "num_heads": 1, "stages": (1, 2), "q_pool": 1}
_TIMM_HIERA |= {"mask_unit_size": (4, 4), "mask_unit_attn": (True, False)}
_MAE = {"mask_ratio": 0.5, "decoder_hidden_size": 12, "decoder_num_attention_heads": 2}
_MAE |= {"decoder_num_hidden_layers": 1, "decoder_intermediate_size": 16}
_HIERA = {"image_size": [32, 32], "patch_size": [7, 7], "embed_dim": 12, "depths": [1, 2], "num_heads": [1, 2]}
_HIERA |= {"num_query_pool": 1, "masked_unit_size": [4, 4], "masked_unit_attention": [True, False], "num_labels": 5}
_HIERA |= {"drop_path_rate": 0.0}
_LONGFORMER = {**TEXT, "attention_window": [4, 4], "sep_token_id": 4, "pad_token_id": 1}
_DEBERTA = {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
_MODERN = {**SIZES, "vocab_size": 60, "max_position_embeddings": 80, "pad_token_id": 1, "local_attention": 6}
_MODERN |= {"global_attn_every_n_layers": 2, "eos_token_id": 2, "bos_token_id": 3, "cls_token_id": 3, "sep_token_id": 4}
_MODERN |= {"reference_compile": False}
_T5 = {"d_model": 24, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 3}
_T5 |= {"vocab_size": 60, "dropout_rate": 0.0, "decoder_start_token_id": 1, "pad_token_id": 1}
_WAVE = {"conv_dim": (8, 8), "conv_kernel": (10, 4), "conv_stride": (5, 4)}
_WAVE2VEC = {**SIZES, **_WAVE, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
_WAVE2VEC |= {"attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0, "activation_dropout": 0.0}
_WAVE2VEC |= {"mask_time_prob": 0.0, "num_feat_extract_layers": 2, "feat_extract_norm": "layer"}
_WAVE2VEC |= {"hidden_dropout": 0.0}
_WHISPER = {**SEQ, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 20}
_MOONSHINE = {"hidden_size": 24, "intermediate_size": 20, "vocab_size": 60, "max_position_embeddings": 80}
_MOONSHINE |= {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 1, "pad_token_id": 1}
_MOONSHINE |= {"encoder_num_attention_heads": 3, "decoder_num_attention_heads": 3}
_DISTIL = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 20, "vocab_size": 60, "max_position_embeddings": 80}
_DISTIL |= {"dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 1}

MORE: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Example]]] = {
    "torchvision_vit": (_torchvision("VisionTransformer", 16, 4, 2, 3, 24, 20), images(16)),
    "torchvision_swin": (lambda: _torchvision_swin("SwinTransformerBlock", "PatchMerging"), images(16)),
    "torchvision_swin2": (lambda: _torchvision_swin("SwinTransformerBlockV2", "PatchMergingV2"), images(16)),
    "torchvision_maxvit": (_torchvision("MaxVit", (32, 32), 8, 4, [8, 16], [1, 1], 8, 0.0), images(32)),
    "torchvision_mvit": (_mvit, lambda rows, seed: Example((normal(seed, rows, 3, 4, 32, 32),))),
    "timm_dinov2": (timm("vit_small_patch14_reg4_dinov2", **_TOY), images(16)),
    "timm_naflexvit": (timm("naflexvit_base_patch16_gap", **_NAFLEX), images(16)),
    "timm_eva": (timm("eva02_tiny_patch14_224", **_TOY), images(16)),
    "timm_beit": (timm("beit_base_patch16_224", **_TOY), images(16)),
    "timm_swin2": (timm("swinv2_tiny_window8_256", **_TIMM_SWIN2), images(16)),
    "timm_cait": (timm("cait_xxs24_224", **_TOY, depth_token_only=1), images(16)),
    "timm_xcit": (timm("xcit_nano_12_p8_224", **_XCIT), images(16)),
    "timm_twins": (timm("twins_svt_small", **_TWINS), images(64)),
    "timm_convit": (timm("convit_tiny", **_TOY, local_up_to_layer=1), images(16)),
    "timm_maxvit": (timm("maxvit_rmlp_pico_rw_256", img_size=64, embed_dim=(32,) * 2, depths=(1,) * 2), images(64)),
    "timm_coatnet": (timm("coatnet_nano_rw_224", img_size=32, embed_dim=(32,) * 4, depths=(1,) * 4), images(32)),
    "timm_hiera": (timm("hiera_tiny_224", **_TIMM_HIERA), images(32)),
    "timm_mvit": (_timm_mvit, images(32)),
    "hf_dinov2": (hf("Dinov2ForImageClassification", **VIT), images(16)),
    "hf_dinov2_registers": (hf("Dinov2WithRegistersForImageClassification", **VIT, num_register_tokens=3), images(16)),
    "hf_dinov3": (hf("DINOv3ViTModel", **{**VIT, "num_register_tokens": 2}), images(16)),
    "hf_beit": (hf("BeitForImageClassification", **VIT, drop_path_rate=0.0), images(16)),
    "hf_vit_msn": (hf("ViTMSNForImageClassification", **VIT), images(16)),
    "hf_vit_mae": (hf("ViTMAEModel", **VIT, **_MAE), _masked_image),
    "hf_clip": (_two_towers("CLIP"), _pairs),
    "hf_clip_vision": (_tower("CLIPVisionModel"), images(16)),
    "hf_siglip": (_two_towers("Siglip"), _pairs),
    "hf_detr": (_detr, images(32)),
    "hf_swin2": (hf("Swinv2ForImageClassification", **_SWIN2), images(16)),
    "hf_segformer": (hf("SegformerForImageClassification", **_SEGFORMER), images(32)),
    "hf_hiera": (hf("HieraForImageClassification", **_HIERA), images(32)),
    "hf_xlm_roberta": (hf("XLMRobertaModel", **TEXT), text(11)),
    "hf_camembert": (hf("CamembertModel", **TEXT), text(11)),
    "hf_electra": (hf("ElectraModel", **TEXT, embedding_size=12), text(11)),
    "hf_distilbert": (hf("DistilBertModel", **_DISTIL), text(11)),
    "hf_mpnet": (hf("MPNetModel", **TEXT), text(11)),
    "hf_albert": (hf("AlbertModel", **TEXT, embedding_size=12), text(11)),
    "hf_deberta": (hf("DebertaModel", **_DEBERTA), text(11)),
    "hf_deberta2": (hf("DebertaV2Model", **_DEBERTA), text(11)),
    "hf_modernbert": (hf("ModernBertModel", **_MODERN), text(11)),
    "hf_longformer": (hf("LongformerModel", **_LONGFORMER), _unpadded),
    "hf_t5": (hf("T5Model", **_T5), text(11, decoder=True)),
    "hf_mbart": (hf("MBartModel", **SEQ), text(11, decoder=True)),
    "hf_pegasus": (hf("PegasusModel", **SEQ), text(11, decoder=True)),
    "hf_whisper": (hf("WhisperModel", **_WHISPER), _spoken),
    "hf_wav2vec2": (hf("Wav2Vec2Model", **_WAVE2VEC), _padded_waves),
    "hf_hubert": (hf("HubertModel", **_WAVE2VEC), lambda rows, seed: Example((normal(seed, rows, 400),))),
    "hf_moonshine": (hf("MoonshineModel", **_MOONSHINE), _padded_speech),
    "hf_pix2struct": (_pix2struct, _patches),
}

# Causal decoders: a token reads what earlier blocks of its row have written.
DECODERS = {
    f"hf_{name}": (partial(plain, name, vocab_size=60), text(11)) for name in (*FAMILIES, "Gemma", "Phi3", "Olmo2")
}
