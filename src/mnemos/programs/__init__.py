"""Models as exported graphs: a step and a prefill, state in and state out, that run without this library or PyTorch.

`export` traces a model, translates it and writes the folder; `forms` has what its parts compute inside a graph.
"""
