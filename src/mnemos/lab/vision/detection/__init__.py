"""Object detection and instance segmentation: data sets, their task and COCO's average precision."""
