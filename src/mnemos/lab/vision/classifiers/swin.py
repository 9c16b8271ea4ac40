"""The Swin transformer (Liu et al. 2021), timm's."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from mnemos.libraries import timm
from mnemos.registry import register
from mnemos.types import InputError

from .image import ImageConfig, check_stages


@register
@dataclass(frozen=True)
class SwinConfig(ImageConfig):
    """timm's SwinTransformer: attention in windows, shifted in every second block; each stage halves the side.

    Stage i has dim·2ⁱ channels. A cache has as many slots as a window has tokens. Swin-T is image 224, patch 4, window
    7, dim 96, depths (2, 2, 6, 2), heads (3, 6, 12, 24), mlp_ratio 4.
    """

    name: ClassVar[str] = "swin"
    patch: int = 2
    window: int = 4
    dim: int = 32
    depths: tuple[int, ...] = (2, 2)
    num_heads: tuple[int, ...] = (2, 4)
    mlp_ratio: float = 2.0

    @property
    def dims(self) -> tuple[int, ...]:
        """The width of each stage."""
        return tuple(self.dim * 2**i for i in range(len(self.depths)))

    def _host(self) -> nn.Module:
        timm()
        from timm.models.swin_transformer import SwinTransformer

        return SwinTransformer(
            img_size=self.image,
            patch_size=self.patch,
            in_chans=self.channels,
            num_classes=self.classes,
            embed_dim=self.dim,
            depths=self.depths,
            num_heads=self.num_heads,
            window_size=self.window,
            mlp_ratio=self.mlp_ratio,
            drop_path_rate=self.drop_path,
        )

    def _check(self) -> None:
        super()._check()
        check_stages(self, "num_heads")
        if self.patch < 1 or self.image % self.patch:
            raise InputError(f"swin: image: expected a multiple of patch {self.patch}, found {self.image}; change one")
        if self.window < 1 or self.mlp_ratio * self.dim < 1:
            raise InputError(
                f"swin: expected a window and an MLP width of at least 1, found {self.window} and "
                f"{self.mlp_ratio * self.dim:g}; raise them"
            )
