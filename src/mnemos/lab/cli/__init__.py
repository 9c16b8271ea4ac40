"""The command line: `mnemos VERB ...`."""

from .verbs import main

__all__ = ["main"]
