"""What the image classifiers have in common: the configuration's fields, and one module around any host."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mnemos.adapt.attach import cache
from mnemos.adapt.attention_cache import cache_attention
from mnemos.config import ModelConfig
from mnemos.memory.grc import GRC
from mnemos.memory.token_cache import AttentionCache
from mnemos.types import InputError, Output, check_heads


@dataclass(frozen=True)
class ImageConfig(ModelConfig):
    """Base of the image classifiers' configurations: square images in, logits of `classes` out.

    image, channels and classes may be 0 in a recipe: what the data has.
    """

    inputs: ClassVar[str] = "images"
    image: int = 32  # side, in pixels
    channels: int = 3
    classes: int = 10
    drop_path: float = 0.0  # share of samples that skip the last block; earlier ones less, in proportion
    cache: GRC | AttentionCache | None = None  # beside every self-attention

    def build(self) -> "ImageModel":
        """The model, initialised as its library does. Raises InputError for sizes that do not fit one another."""
        self._check()
        host = self._host()
        example = torch.zeros(1, self.channels, self.image, self.image)
        if isinstance(self.cache, GRC):
            cache(host, self.cache, example=example)
        elif self.cache is not None:
            cache_attention(host, self.cache, example)
        return ImageModel(self, host)

    def _host(self) -> nn.Module:
        raise NotImplementedError

    def _check(self) -> None:
        """Raise InputError for numbers that no image model can have."""
        for name in ("image", "channels", "classes"):
            if getattr(self, name) < 1:
                raise InputError(f"{self.name}: {name} must be at least 1, found {getattr(self, name)}")
        if not 0 <= self.drop_path < 1:
            raise InputError(f"{self.name}: drop_path must be at least 0 and below 1, found {self.drop_path}")


class ImageModel(nn.Module):
    """`logits, None = model(x)`: an image classifier around a host, the module of its library, `model.host`.

    x [B, C, H, W], normalised, of the size that the configuration says -> logits [B, classes]. It keeps no state from
    call to call: a cache is shared by the batch, and is a buffer. Raises InputError for other shapes, states, masks.
    """

    def __init__(self, config: ImageConfig, host: nn.Module) -> None:
        super().__init__()
        self.config, self.host = config, host

    def forward(self, x: Tensor, state: None = None, mask: None = None) -> Output:
        """See the class."""
        c = self.config
        if x.dim() != 4 or x.shape[1:] != (c.channels, c.image, c.image) or not x.is_floating_point():
            raise InputError(
                f"expected images [B, {c.channels}, {c.image}, {c.image}] of floats, found {x.dtype} of shape "
                f"{tuple(x.shape)}; resize them, or set model.image and model.channels"
            )
        if state is not None or mask is not None:
            raise InputError("an image model takes no state and no mask, found one; give it images alone")
        y: Any = self.host(x)
        return getattr(y, "logits", y), None


def check_stages(config: Any, *names: str) -> None:
    """Raise InputError unless the named fields have one entry above 0 a stage, and heads share their widths evenly."""
    stages = len(config.depths)
    for name in ("depths", *names):
        found = getattr(config, name)
        if len(found) != stages or not stages or any(not n > 0 for n in found):
            raise InputError(
                f"{config.name}: expected {name} of {stages or 1} entries above 0, one a stage as in depths "
                f"{config.depths}, found {found}"
            )
    for width, heads in zip(config.dims, config.num_heads, strict=True):
        check_heads(width, heads)
