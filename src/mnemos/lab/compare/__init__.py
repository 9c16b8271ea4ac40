"""Comparisons of recipes: the same data, seeds and order, so that what differs is the model. Start with `compare`."""
