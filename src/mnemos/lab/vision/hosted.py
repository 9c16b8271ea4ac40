"""Any image classifier of timm or Hugging Face as the host of a cache: its own size, the data's classes."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.errors import one_line
from mnemos.lab.hosted.hub import TIMM, host_config, host_of, host_weights
from mnemos.lab.vision.classifiers import ImageConfig, ImageModel
from mnemos.libraries import timm
from mnemos.registry import register
from mnemos.types import InputError

_AUTO = "AutoModelForImageClassification"


@register
@dataclass(frozen=True)
class HostedClassifierConfig(ImageConfig):
    """An image classifier of timm or Hugging Face, with or without a cache: what `--model timm:NAME` chooses.

    Images of the data are scaled (bilinear) to the size that the host was made for, if it declares one, and one channel
    is repeated for a host of several. They are normalised as the data are: photos as the host's were, other data by
    their own mean and deviation. `build` makes new weights; `train.init_from` names those to start with.
    """

    name: ClassVar[str] = "hosted-classifier"
    host: str = "timm:test_vit"  # or the settings of a model of Transformers as JSON (`hub.settings_of`)

    def build(self) -> "HostedClassifier":
        return HostedClassifier(self, super().build().host)

    def _host(self) -> nn.Module:
        size: Any  # of the images that it is made for: the side, or height and width; None: any
        if self.host.startswith(TIMM):
            # --- of timm ---
            name = self.host.removeprefix(TIMM)
            create = partial(timm().create_model, name, pretrained=False, num_classes=self.classes)
            try:
                try:
                    model = create(drop_path_rate=self.drop_path)  # also 0: some have another default
                except TypeError:  # some have none
                    if self.drop_path:
                        raise
                    model = create()
            except (RuntimeError, TypeError) as error:
                problem = one_line(error)
                raise InputError(f"{self.name}: host: expected a model of timm, found {name!r} ({problem})") from None
            channels, *size = model.default_cfg["input_size"]
        else:
            # --- of Transformers ---
            config = host_config(self.host)
            config.num_labels = self.classes
            if hasattr(config, "drop_path_rate"):
                config.drop_path_rate = self.drop_path
            elif self.drop_path:
                raise InputError(
                    f"{self.name}: drop_path: expected 0 for a {config.model_type}, which has none, found "
                    f"{self.drop_path}; set it to 0"
                )
            model, channels = host_of(_AUTO, config), getattr(config, "num_channels", 3)
            size = getattr(config, "image_size", None)
        if self.channels not in (1, channels):
            raise InputError(
                f"{self.name}: channels: expected 1 or the {channels} of the host, found {self.channels}; choose "
                "another host"
            )
        return Scaled(model, channels, (size, size) if isinstance(size, int) else tuple(size) if size else None)


class Scaled(nn.Module):
    """A classifier `host` that reads images x [B, C, H, W] in its own size and channels."""

    def __init__(self, host: nn.Module, channels: int, size: tuple[int, int] | None) -> None:
        super().__init__()
        self.host, self.channels, self.size = host, channels, size

    def forward(self, x: Tensor) -> Any:
        if self.size is not None and x.shape[-2:] != self.size:
            smaller = any(a > b for a, b in zip(x.shape[-2:], self.size, strict=True))
            x = F.interpolate(x, self.size, mode="bilinear", antialias=smaller)
        return self.host(x.expand(-1, self.channels, -1, -1))


class HostedClassifier(ImageModel):
    """An `ImageModel` around `Scaled`."""

    def pretrained(self, source: str) -> dict[str, Tensor]:
        """The trained weights of a host (`hub.is_source`) by this model's names."""
        return {f"host.host.{name}": value for name, value in host_weights(_AUTO, source).items()}
