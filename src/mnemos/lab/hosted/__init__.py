"""Trained models of other libraries in this library's loop: decoders and encoders, and their weights."""
