"""Recipes to start from, one or more for every task: minutes on two cores. Those of papers' claims are in `papers`."""
