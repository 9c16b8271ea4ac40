"""Image classifiers: the host models of timm and Hugging Face, with or without a cache, under one configuration."""

from .image import ImageConfig, ImageModel
from .pvt import PVTConfig
from .swin import SwinConfig
from .vit import ViTConfig

__all__ = ["ImageConfig", "ImageModel", "PVTConfig", "SwinConfig", "ViTConfig"]
