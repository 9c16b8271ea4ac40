"""Fixtures of this folder."""

from native_kernels import variant

__all__ = ["variant"]
