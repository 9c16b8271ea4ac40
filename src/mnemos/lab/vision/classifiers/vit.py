"""The vision transformer (Dosovitskiy et al. 2021), timm's."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from mnemos.libraries import timm
from mnemos.registry import register
from mnemos.types import InputError, check_heads

from .image import ImageConfig


@register
@dataclass(frozen=True)
class ViTConfig(ImageConfig):
    """timm's VisionTransformer: patches as tokens. ViT-S/16 is image 224, patch 16, dim 384, depth 12, heads 6."""

    name: ClassVar[str] = "vit"
    patch: int = 4  # side of a patch
    dim: int = 64
    depth: int = 4
    num_heads: int = 4
    mlp_ratio: float = 2.0  # hidden width of the MLP over dim
    dropout: float = 0.0  # of embedded patches, and of the outputs of attention and MLP
    pool: Literal["cls", "mean"] = "cls"  # the classified vector: a class token, or the mean over patches

    def _host(self) -> nn.Module:
        timm()
        from timm.models.vision_transformer import VisionTransformer

        return VisionTransformer(
            img_size=self.image,
            patch_size=self.patch,
            in_chans=self.channels,
            num_classes=self.classes,
            global_pool="token" if self.pool == "cls" else "avg",
            class_token=self.pool == "cls",
            embed_dim=self.dim,
            depth=self.depth,
            num_heads=self.num_heads,
            mlp_ratio=self.mlp_ratio,
            pos_drop_rate=self.dropout,
            proj_drop_rate=self.dropout,
            drop_path_rate=self.drop_path,
        )

    def _check(self) -> None:
        super()._check()
        check_heads(self.dim, self.num_heads)
        if self.patch < 1 or self.image % self.patch:
            raise InputError(f"vit: image: expected a multiple of patch {self.patch}, found {self.image}; change one")
        if self.depth < 1 or self.mlp_ratio * self.dim < 1 or not 0 <= self.dropout < 1:
            raise InputError(
                f"vit: expected a depth and an MLP width of at least 1 and a dropout below 1, found {self.depth}, "
                f"{self.mlp_ratio * self.dim:g} and {self.dropout}; change them"
            )
