"""Detectors of torchvision on backbones of timm, Hugging Face or this library, with or without gated caches."""

from mnemos.lab.vision.classifiers.pvt_features import PVT2Features, PVTFeatures

from .detector import Detector, DetectorConfig, RegionConfig
from .padding import leave_out_padding
from .pyramid import FeaturePyramid

__all__ = [
    "Detector",
    "DetectorConfig",
    "FeaturePyramid",
    "PVT2Features",
    "PVTFeatures",
    "RegionConfig",
    "leave_out_padding",
]
