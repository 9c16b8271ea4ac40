"""Pictures: classifiers with caches, and detection.

Read `classifiers` first: ViT, Swin and PVT of timm and Transformers under one configuration, with a gated cache or, in
`attention_cache`, the one that the paper compares it with. `hosted` is any other classifier, by name. `detectors` puts
torchvision's detectors on such a backbone; `detection` has their data, task and scores, and `detect` their use.
"""
