"""Models as exported graphs: a step and a prefill, state in and state out, that run without this library or PyTorch.

`export` traces a model, translates it and writes the folder; `forms` has how its layers are written for a graph.
`mnemos` itself lists the one public name, `export`; this package lists none.
"""
