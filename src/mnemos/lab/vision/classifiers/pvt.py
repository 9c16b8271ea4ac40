"""Pyramid vision transformers (Wang et al. 2021, 2022): version 1 is Hugging Face's, version 2 timm's."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from mnemos.libraries import timm, transformers
from mnemos.registry import register
from mnemos.types import InputError

from .image import ImageConfig, check_stages
from .pvt_features import PVT2Features, PVTFeatures


@register
@dataclass(frozen=True)
class PVTConfig(ImageConfig):
    """PVT, a pyramid of stages whose attentions have fewer keys than queries: version 1 or 2.

    Each stage after the first halves the side. A stage of side s has s² queries and (s/r)² keys, where r is its
    reduction. Version 1 has a class token in the last stage, whose reduction is 1; version 2 overlaps its patches, has
    a convolution in its MLP, and classifies the mean. PVT-Tiny is image 224, patch 4, dims (64, 128, 320, 512),
    depths (2, 2, 2, 2), num_heads (1, 2, 5, 8), mlp_ratios (8, 8, 4, 4), reductions (8, 4, 2, 1).
    """

    name: ClassVar[str] = "pvt"
    version: Literal[1, 2] = 1
    patch: int = 4  # side of the first stage's patches
    dims: tuple[int, ...] = (32, 64)
    depths: tuple[int, ...] = (2, 2)
    num_heads: tuple[int, ...] = (2, 4)
    mlp_ratios: tuple[int, ...] = (2, 2)
    reductions: tuple[int, ...] = (2, 1)

    @property
    def sides(self) -> tuple[int, ...]:
        """The side of each stage, in tokens."""
        return tuple(self.image // (self.patch * 2**i) for i in range(len(self.depths)))

    def features(self) -> PVTFeatures | PVT2Features:
        """The model without its classifier, and without a cache: a backbone of feature maps for images of any size."""
        self._check()
        host: Any = self._host()
        return PVTFeatures(host.pvt.encoder) if self.version == 1 else PVT2Features(host)

    def _host(self) -> nn.Module:
        return self._first() if self.version == 1 else self._second()

    def _first(self) -> nn.Module:
        transformers()
        from transformers import PvtConfig, PvtForImageClassification

        strides = (self.patch, *(2 for _ in self.depths[1:]))
        config = PvtConfig(
            image_size=self.image,
            num_channels=self.channels,
            num_labels=self.classes,
            num_encoder_blocks=len(self.depths),
            depths=self.depths,
            hidden_sizes=self.dims,
            num_attention_heads=self.num_heads,
            mlp_ratios=self.mlp_ratios,
            sequence_reduction_ratios=self.reductions,
            patch_sizes=strides,
            strides=strides,
            drop_path_rate=self.drop_path,
        )
        host = PvtForImageClassification(config)
        if self.patch != 4:  # after the first stage, the library's tables of positions fit a patch of 4 only
            parts = zip(self.sides, self.dims, host.pvt.encoder.patch_embeddings, strict=True)
            for side, width, embedding in parts:
                table = torch.empty(1, side * side + (embedding.cls_token is not None), width)
                nn.init.trunc_normal_(table, std=config.initializer_range)
                embedding.position_embeddings = nn.Parameter(table)
        return host

    def _second(self) -> nn.Module:
        timm()
        from timm.models.pvt_v2 import OverlapPatchEmbed, PyramidVisionTransformerV2

        host = PyramidVisionTransformerV2(
            in_chans=self.channels,
            num_classes=self.classes,
            depths=self.depths,
            embed_dims=self.dims,
            num_heads=self.num_heads,
            sr_ratios=self.reductions,
            mlp_ratios=self.mlp_ratios,
            drop_path_rate=self.drop_path,
        )
        if self.patch != 4:  # timm builds a patch of 4; here the same module in proportion, initialised alike
            host.patch_embed = OverlapPatchEmbed(2 * self.patch - 1, self.patch, self.channels, self.dims[0])
            projection = host.patch_embed.proj
            fan_out = projection.kernel_size[0] * projection.kernel_size[1] * projection.out_channels
            nn.init.normal_(projection.weight, std=math.sqrt(2.0 / fan_out))
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        return host

    def _check(self) -> None:
        super()._check()
        check_stages(self, "dims", "num_heads", "mlp_ratios", "reductions")
        if self.patch < 2:
            raise InputError(f"pvt: patch: expected at least 2, found {self.patch}; raise it")
        if self.image % (unit := self.patch * 2 ** (len(self.depths) - 1)):
            raise InputError(
                f"pvt: image: expected a multiple of {unit} for {len(self.depths)} stages, found {self.image}"
            )
        for side, reduction in zip(self.sides, self.reductions, strict=True):
            if side % reduction:
                raise InputError(
                    f"pvt: reductions: expected a divisor of the stage's side of {side} tokens, found {reduction}"
                )
        if self.version == 1 and self.reductions[-1] != 1:
            raise InputError(
                f"pvt: reductions: expected 1 for the last stage, which has a class token in version 1, found "
                f"{self.reductions}; change it"
            )
