"""Figures 4 to 8. Each is implemented in its own file."""

from .forgetting import figure4
from .lengths import figure8
from .model_costs import figure5
from .slot_attention_figures import figure6, figure7

__all__ = ["figure4", "figure5", "figure6", "figure7", "figure8"]
