"""Gated caches in models that someone else wrote: torch.nn, timm, Hugging Face."""

from .attach import cache, uncache
from .branch import HostBranch
from .pretrained import from_pretrained
from .report import Report

__all__ = ["HostBranch", "Report", "cache", "from_pretrained", "uncache"]
