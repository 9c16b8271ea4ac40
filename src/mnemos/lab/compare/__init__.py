"""Comparisons of recipes: budgets, baselines, learning rates, statistics."""
