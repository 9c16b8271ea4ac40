"""Models as exported graphs: a step and a prefill, state in and state out, that run without this library or PyTorch.

`export` traces a model, translates it and writes the folder; `forms` has the forms of its layers that a graph can hold.
`mnemos` itself lists the one public name, `export`; this package lists none.
"""
