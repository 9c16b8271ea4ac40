"""The feature maps of pyramid vision transformers (Wang et al. 2021, 2022), for images of any size."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.memory.stored import clear_caches
from mnemos.types import InputError


class _Features(nn.Module):
    """A backbone that can start from a classifier."""

    def classifier_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a classifier by this module's names."""
        raise NotImplementedError

    def load_classifier(self, weights: Mapping[str, Tensor]) -> None:
        """Load `classifier_weights`, and set all caches to zero (Appendix B of the paper).

        The gates of caches that the classifier lacks stay as they are. Raises InputError if another weight is missing,
        or of another shape.
        """
        found, own = self.classifier_weights(weights), self.state_dict()
        parameters = {name for name, _ in self.named_parameters()}
        cached = any(".grc." in name for name in found)
        wanted = [name for name in own if name in parameters and (cached or ".grc." not in name)]
        wrong = [name for name in wanted if name not in found or found[name].shape != own[name].shape]
        if wrong:
            name = wrong[0]
            what = f"shape {tuple(found[name].shape)}" if name in found else "none"
            raise InputError(
                f"expected the weights of a classifier with this PVT's sizes, found {what} for {name}, and "
                f"{len(wrong) - 1} more that do not fit; use a model of the same widths, depths and caches"
            )
        self.load_state_dict({**own, **found})
        clear_caches(self)


class PVTFeatures(_Features):
    """The maps [B, C_i, H/4·2^i, W/4·2^i] of each stage of Hugging Face's PVT, for images [B, 3, H, W] of any size.

    As in the authors' detectors there is no class token, no last norm, and tables of positions are interpolated
    (bilinear) to the grid of each call; Hugging Face's own interpolation does not take other sizes. The encoder becomes
    part of this module and is changed: pass a model that nothing else uses.
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

    def forward(self, images: Tensor) -> list[Tensor]:
        """The maps, the finest first."""
        maps: list[Tensor] = []
        x = images
        for embedding, blocks in zip(self.encoder.patch_embeddings, self.encoder.block, strict=True):
            patches = embedding.projection(x)
            height, width = patches.shape[-2:]
            tokens = embedding.layer_norm(patches.flatten(2).transpose(1, 2))
            tokens = embedding.dropout(tokens + _positions(embedding.position_embeddings, height, width))
            for block in blocks:
                tokens = block(tokens, height, width)[0]
            x = tokens.transpose(1, 2).unflatten(2, (height, width)).contiguous()
            maps.append(x)
        return maps

    def first_stages(self, count: int) -> list[nn.Module]:
        """The modules of the first stages."""
        return [*self.encoder.patch_embeddings[:count], *self.encoder.block[:count]]

    def classifier_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a classifier of the same PVT by this module's names, without its caches' contents.

        weights: the state of Hugging Face's `PvtModel` or `PvtForImageClassification`, or of an image model of this
        library, with or without gated caches. The class token, the last norm and the head are left out.
        """
        found = {name.rpartition("encoder.")[2]: value for name, value in weights.items() if "encoder." in name}
        own = self.encoder.state_dict()
        table = f"patch_embeddings.{len(self.channels) - 1}.position_embeddings"
        if table in found and found[table].shape[1] == own[table].shape[1] + 1:
            found[table] = found[table][:, 1:]
        stored = {name for name, _ in self.encoder.named_buffers()}
        return {f"encoder.{name}": found[name] for name in own if name in found and name not in stored}


class PVT2Features(_Features):
    """The maps [B, C_i, H/4·2^i, W/4·2^i] of each stage of timm's PVT v2, for images [B, 3, H, W] of any size."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        parts: Any = host
        self.patch_embed, self.stages = parts.patch_embed, parts.stages
        self.channels = [stage["num_chs"] for stage in parts.feature_info]

    def forward(self, images: Tensor) -> list[Tensor]:
        """The maps, the finest first."""
        maps, x = [], self.patch_embed(images)
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps

    def first_stages(self, count: int) -> list[nn.Module]:
        """The modules of the first stages."""
        return [*([self.patch_embed] if count else []), *self.stages[:count]]

    def classifier_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a classifier of the same PVT v2 by this module's names, without its caches' contents.

        weights: the state of timm's `PyramidVisionTransformerV2`, or of an image model of this library, with or without
        gated caches. The head is left out.
        """
        first = "patch_embed.proj.weight"
        host = next((name.removesuffix(first) for name in weights if name.endswith(first)), "")
        stored = {name for name, _ in self.named_buffers()}
        names = [name for name in self.state_dict() if f"{host}{name}" in weights and name not in stored]
        return {name: weights[f"{host}{name}"] for name in names}


def _positions(table: Tensor, height: int, width: int) -> Tensor:
    """A table [1, side², C] on a grid of another size: [1, height·width, C]."""
    side = math.isqrt(table.shape[1])
    if (height, width) == (side, side):
        return table
    image = table.transpose(1, 2).unflatten(2, (side, side))
    return F.interpolate(image, (height, width), mode="bilinear").flatten(2).transpose(1, 2)
