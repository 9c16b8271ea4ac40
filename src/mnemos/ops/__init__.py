"""Pure functions of tensors; a folder an algorithm, each with its equations in reference.py."""
