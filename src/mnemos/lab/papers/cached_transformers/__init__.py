"""Cached Transformers: recipes and claims."""
