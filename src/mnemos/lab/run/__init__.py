"""Recipes, the loop, checkpoints and run folders."""
