"""The claims of each paper, and the code that reproduces them."""
