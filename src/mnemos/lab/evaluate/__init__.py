"""Metrics, counts and probes of a trained model."""
