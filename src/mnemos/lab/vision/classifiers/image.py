"""The base of the image classifiers: their common configuration, and one module around any host model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor, nn

from mnemos.config import ModelConfig
from mnemos.hosts.attach import cache
from mnemos.hosts.attention_cache import cache_attention
from mnemos.memory.gated_cache import caches
from mnemos.memory.grc import GRC
from mnemos.memory.token_cache import AttentionCache
from mnemos.models.blocks import Stateless
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
            cache(host, self.cache, example=example)
        elif self.cache is not None:
            cache_attention(host, self.cache, example)
        return ImageModel(self, host)

    def _host(self) -> nn.Module:
        raise NotImplementedError

    def _check(self) -> None:
        """Raise InputError for sizes that are not possible in any image model."""
        for name in ("image", "channels", "classes"):
            if getattr(self, name) < 1:
                raise InputError(f"{self.name}: {name}: expected at least 1, found {getattr(self, name)}; raise it")
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

    def forward(self, x: Tensor, state: None = None, mask: Tensor | None = None) -> tuple[Tensor, None]:
        """See the class."""
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
        return all(cache.grc.read == "sample" for cache in caches(self))


class Stages(Protocol):
    """A configuration of several stages, each with a width and a number of heads."""

    @property
    def name(self) -> str:
        """The model's registered name."""
        ...

    @property
    def depths(self) -> tuple[int, ...]:
        """Blocks per stage."""
        ...

    @property
    def dims(self) -> tuple[int, ...]:
        """Widths per stage."""
        ...

    @property
    def num_heads(self) -> tuple[int, ...]:
        """Heads per stage."""
        ...


def check_stages(config: Stages, *names: str) -> None:
    """Raise InputError unless the named fields have one entry above 0 per stage, and heads divide their widths."""
    stages = len(config.depths)
    for name in ("depths", *names):
        found = getattr(config, name)
        if len(found) != stages or not stages or any(not n > 0 for n in found):
            raise InputError(
                f"{config.name}: expected {name} of {stages or 1} entries above 0, one per stage as in depths "
                f"{config.depths}, found {found}; change one of them"
            )
    for width, heads in zip(config.dims, config.num_heads, strict=True):
        check_heads(width, heads)
