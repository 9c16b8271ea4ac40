"""What the papers' comparisons alone need: BigBird, Reformer, an adaptive softmax and a mixture of logistics.

The registry names their modules, so they are used like the library's own. Each folder has its layer or head, the
operator and the equations in reference.py.
"""
