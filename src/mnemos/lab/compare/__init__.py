"""Comparisons of recipes: the same data, seeds and order, so that what differs is the model.

Start with `compare`, which reads from top to bottom: which recipes (`baselines` adds never-written ones, `equal` says
what they must have in common), for how many steps (`budgets`), which runs of them (`runs` chooses learning rates,
`processes` trains each in a process of its own), and what came out (`comparison`, with the statistics of
`significance`). `arguments` are the options of the command.
"""
