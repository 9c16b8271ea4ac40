"""Detectors of torchvision on backbones of timm, Hugging Face or this library, with or without gated caches."""

from .padding import leave_out_padding
from .pvt_features import PVTFeatures
from .pyramid import FeaturePyramid

__all__ = ["FeaturePyramid", "PVTFeatures", "leave_out_padding"]
