"""What the papers' comparisons alone need: BigBird, Reformer, an adaptive softmax and a mixture of logistics.

The registry names their modules, so they are used like the library's own. Each file has a layer or head and its
operator; README.md has the decisions.
"""
