"""Models of Hugging Face Transformers as `y, state = step(x, state)`: `mnemos.functional`."""

from .functional_cache import FunctionalState
from .functional_model import Functional, functional

__all__ = ["Functional", "FunctionalState", "functional"]
