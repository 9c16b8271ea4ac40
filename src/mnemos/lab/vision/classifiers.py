"""Image classifiers: host models of timm and Hugging Face, with or without a cache, under one configuration.

The vision transformer (Dosovitskiy et al. 2021) and Swin (Liu et al. 2021) are timm's. Of the pyramid vision
transformers (Wang et al. 2021, 2022) version 1 is Hugging Face's and version 2 timm's; they are backbones too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.config import ModelConfig
from mnemos.hosts.attach import cache
from mnemos.lab.hosted.model import Stateless, keep_tables
from mnemos.lab.vision.attention_cache import AttentionCache, cache_attention
from mnemos.libraries import timm, transformers
from mnemos.memory.gated_cache import GRC, StoredCache, caches
from mnemos.models.shared import check_sizes
from mnemos.ops.checks import check_dropout
from mnemos.registry import register
from mnemos.types import InputError, check_heads


@dataclass(frozen=True)
class ImageConfig(ModelConfig):
    """Base of the configurations of image classifiers: from square images to logits of `classes`.

    image, channels and classes may be 0 in a recipe; the data then gives them.
    """

    inputs: ClassVar[str] = "images"
    image: int = 32  # side, in pixels
    channels: int = 3
    classes: int = 10
    drop_path: float = 0.0  # share of samples that skip the last block; proportionally fewer skip earlier blocks
    cache: GRC | AttentionCache | None = None  # added to every self-attention

    def build(self) -> "ImageModel":
        """The model, initialised as its library does. Raises InputError for sizes that do not fit together."""
        self._check()
        host = self._host()
        example = torch.zeros(1, self.channels, self.image, self.image)
        if isinstance(self.cache, GRC):
            if self.cache.scope != "shared":
                raise InputError(
                    f"{self.name}: cache.scope: expected shared, because an image is no stream, found "
                    f"{self.cache.scope}; use --model.cache.scope shared"
                )
            cache(host, self.cache, example=example)
        elif self.cache is not None:
            cache_attention(host, self.cache, example)
        return ImageModel(self, host)

    def _host(self) -> nn.Module:
        """The model of another library."""
        raise NotImplementedError

    def _check(self) -> None:
        """Raise InputError for sizes that no classifier can have."""
        check_sizes(self, image=1, channels=1, classes=1)
        if not 0 <= self.drop_path < 1:
            raise InputError(
                f"{self.name}: drop_path: expected at least 0 and below 1, found {self.drop_path}; use 0 for none"
            )


class ImageModel(Stateless, nn.Module):
    """`logits, None = model(x)`: an image classifier around `model.host`, a module of another library.

    x [B, C, H, W], normalised, of the configured size -> logits [B, classes]. There is no state between calls: a cache
    is shared by the batch and is a buffer. Raises InputError for other shapes, and for a state or mask.
    """

    def __init__(self, config: ImageConfig, host: nn.Module) -> None:
        super().__init__()
        self.config, self.host = config, host
        keep_tables(self)

    def forward(self, x: Tensor, state: None = None, mask: Tensor | None = None) -> tuple[Tensor, None]:
        c = self.config
        if x.dim() != 4 or x.shape[1:] != (c.channels, c.image, c.image) or not x.is_floating_point():
            raise InputError(
                f"expected images [B, {c.channels}, {c.image}, {c.image}] of floats, found {x.dtype} of shape "
                f"{tuple(x.shape)}; resize them, or set model.image and model.channels"
            )
        if state is not None or mask is not None:
            raise InputError("image model: expected no state and no mask, found one; pass images only")
        y = self.host(x)
        logits: Tensor = getattr(y, "logits", y)
        return logits, None

    if TYPE_CHECKING:
        __call__ = forward

    @property
    def rows_independent(self) -> bool:
        """Whether a row's output in training depends on that row alone: unless a cache reads the batch mean."""
        return all(cache.grc.constant or cache.grc.read == "sample" for cache in caches(self))


def check_patches(config: ImageConfig, side: int) -> None:
    """Raise InputError unless patches of a side, those of the last stage, divide the image."""
    if config.image % side:
        raise InputError(
            f"{config.name}: expected an image size that the patches of all stages divide, a multiple of {side}, found "
            f"image {config.image}; set model.patch, or the size of the data's pictures"
        )


def check_stages(config: Any, *names: str) -> None:
    """Raise InputError unless the named fields have one entry above 0 per stage, and heads divide their widths."""
    stages = len(config.depths)
    for name in ("depths", *names):
        entries = getattr(config, name)
        if len(entries) != stages or not stages or any(not n > 0 for n in entries):
            raise InputError(
                f"{config.name}: expected {name} of {stages or 1} entries above 0, one per stage as in depths "
                f"{config.depths}, found {entries}; change one of them"
            )
    for width, heads in zip(config.dims, config.num_heads, strict=True):
        check_heads(width, heads)


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

    def _check(self) -> None:
        super()._check()
        check_heads(self.dim, self.num_heads)
        check_sizes(self, patch=1, depth=1, mlp_ratio=1 / self.dim)
        check_dropout(self.dropout)
        check_patches(self, self.patch)

    def _host(self) -> nn.Module:
        return timm().models.vision_transformer.VisionTransformer(
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
        return tuple(self.dim * 2**i for i in range(len(self.depths)))

    def _check(self) -> None:
        super()._check()
        check_stages(self, "num_heads")
        check_sizes(self, patch=1, window=1, mlp_ratio=1 / self.dim)
        check_patches(self, self.patch)

    def _host(self) -> nn.Module:
        return timm().models.swin_transformer.SwinTransformer(
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


class Features(nn.Module):
    """Base of backbones: images [B, 3, H, W] of any size -> the maps [B, C_i, H/4·2^i, W/4·2^i] of each stage."""

    channels: list[int]  # C_i

    def classifier_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a classifier of the same PVT by this module's names, for `load_state_dict(…, strict=False)`.

        weights: the state of the library's model, or of an `ImageModel` around it. What only a classifier has (head,
        last norm, class token) is left out, and so are the contents of its caches, which start empty (Appendix B of the
        paper).
        """
        own = self.state_dict()
        first = next(iter(own))  # it shows what stands before the names of a classifier
        prefix = next((name.removesuffix(first) for name in weights if name.endswith(first)), "")
        caches = {f"{name}.cache" for name, module in self.named_modules() if isinstance(module, StoredCache)}
        named = {
            name: weights[f"{prefix}{name}"] for name in own if f"{prefix}{name}" in weights and name not in caches
        }
        for name, x in named.items():
            if name.endswith("position_embeddings") and x.shape[1] == own[name].shape[1] + 1:
                named[name] = x[:, 1:]  # without the class token's
        return named


class PVTFeatures(Features):
    """`Features` of Hugging Face's PVT, whose own interpolation of positions does not take other sizes.

    As in the authors' detectors there is no class token, no last norm, and tables of positions are interpolated
    (bilinear) to the grid of each call. The encoder becomes part of this module and is changed: pass a model that
    nothing else uses.
    """

    encoder: Any  # its parts are those of a library without types

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        last = self.encoder.patch_embeddings[-1]
        if last.cls_token is not None:
            last.cls_token = None
            last.position_embeddings = nn.Parameter(last.position_embeddings.detach()[:, 1:].clone())
        self.encoder.layer_norm = nn.Identity()
        self.channels = [stage.projection.out_channels for stage in self.encoder.patch_embeddings]

    def forward(self, x: Tensor) -> list[Tensor]:
        maps: list[Tensor] = []
        for embedding, blocks in zip(self.encoder.patch_embeddings, self.encoder.block, strict=True):
            patches = embedding.projection(x)
            height, width = patches.shape[-2:]
            tokens = embedding.layer_norm(patches.flatten(2).transpose(1, 2))
            positions = embedding.position_embeddings  # [1, side², C]
            side = math.isqrt(positions.shape[1])
            if (height, width) != (side, side):
                image = positions.transpose(1, 2).unflatten(2, (side, side))
                positions = F.interpolate(image, (height, width), mode="bilinear").flatten(2).transpose(1, 2)
            tokens = embedding.dropout(tokens + positions)
            for block in blocks:
                tokens = block(tokens, height, width)[0]
            x = tokens.transpose(1, 2).unflatten(2, (height, width)).contiguous()
            maps.append(x)
        return maps


class PVT2Features(Features):
    """`Features` of timm's PVT v2, which has no tables of positions."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        parts: Any = host
        self.patch_embed, self.stages = parts.patch_embed, parts.stages
        self.channels = [stage["num_chs"] for stage in parts.feature_info]

    def forward(self, x: Tensor) -> list[Tensor]:
        x, maps = self.patch_embed(x), []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


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

    def features(self) -> Features:
        """The model without its classifier, and without a cache: a backbone of feature maps for images of any size."""
        self._check()
        host: Any = self._host()
        return PVTFeatures(host.pvt.encoder) if self.version == 1 else PVT2Features(host)

    @property
    def sides(self) -> list[int]:
        """The side of each stage, in tokens."""
        return [self.image // (self.patch * 2**i) for i in range(len(self.depths))]

    def _check(self) -> None:
        super()._check()
        check_stages(self, "dims", "num_heads", "mlp_ratios", "reductions")
        check_sizes(self, patch=2)
        check_patches(self, self.patch * 2 ** (len(self.depths) - 1))
        divide = all(side % reduction == 0 for side, reduction in zip(self.sides, self.reductions, strict=True))
        if not divide or (self.version == 1 and self.reductions[-1] != 1):
            raise InputError(
                f"pvt: reductions: expected divisors of the stages' sides of {self.sides} tokens, and 1 for the last "
                f"one, which has a class token in version 1, found {self.reductions}; change them"
            )

    def _host(self) -> nn.Module:
        # --- version 1 ---
        if self.version == 1:
            library, strides = transformers(), (self.patch, *(2 for _ in self.depths[1:]))
            config = library.PvtConfig(
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
            host = library.PvtForImageClassification(config)
            if self.patch != 4:  # after the first stage, the library's tables of positions fit a patch of 4 only
                for side, width, embedding in zip(
                    self.sides, self.dims, host.pvt.encoder.patch_embeddings, strict=True
                ):
                    table = torch.empty(1, side * side + (embedding.cls_token is not None), width)
                    nn.init.trunc_normal_(table, std=config.initializer_range)
                    embedding.position_embeddings = nn.Parameter(table)
            return host

        # --- version 2 ---
        library = timm().models.pvt_v2
        host = library.PyramidVisionTransformerV2(
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
            host.patch_embed = library.OverlapPatchEmbed(2 * self.patch - 1, self.patch, self.channels, self.dims[0])
            projection = host.patch_embed.proj
            fan_out = projection.kernel_size[0] * projection.kernel_size[1] * projection.out_channels
            nn.init.normal_(projection.weight, std=math.sqrt(2.0 / fan_out))
            nn.init.zeros_(projection.bias)
        return host
