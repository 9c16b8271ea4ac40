"""What the papers' comparisons alone need: BigBird, Reformer, an adaptive softmax and a mixture of logistics.

Attentions and heads like those of the library, of which the registry knows where they stand. Each folder has its layer
or head, the operator and the equations in reference.py.
"""
