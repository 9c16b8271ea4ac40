"""Detection data and what is scored.

Read `scenes` first: the one form of pictures with objects, and their batches. `coco` reads it from files, `shapes`
draws it; `task` is the loss and the metrics of a detector, and `results` COCO's figures and drawn photos.
"""
