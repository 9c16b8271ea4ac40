"""The claims of Cached Transformers, with the paper's own numbers only."""

from ..claim import Claim, Paper

_TABLES = "mnemos.papers.cached_transformers.tables"
_FIGURES = "mnemos.papers.cached_transformers.figures"

CACHED_TRANSFORMERS = Paper(
    "cached_transformers",
    "Cached Transformers: Improving Transformers with Differentiable Memory Cache (arXiv 2312.12742)",
    (
        Claim(
            "figure1",
            "accuracy by FLOPs, with and without a cache",
            f"{_FIGURES}:figure1",
            "At equal FLOPs, cached models are more accurate than their baselines.",
        ),
        Claim(
            "figure4",
            "o_self and o_mem of a middle layer, as images",
            f"{_FIGURES}:figure4",
            "o_mem shows what the images of a class have in common, o_self what is particular to an image.",
        ),
        Claim(
            "figure5",
            "σ(λ) by layer and head",
            f"{_FIGURES}:figure5",
            "σ(λ) > 0.5 in more than half of the layers; it is lower in the last layers.",
        ),
        Claim(
            "table1",
            "image classification, with and without a cache",
            f"{_TABLES}:table1",
            "A cache adds 0.5 to 3.3 points of top-1 accuracy on ImageNet-1k.",
            ("top-1", "top-1 cached", "top-5", "top-5 cached"),
            {
                "ViT-S": (79.9, 81.3, 95.0, 95.5),
                "PVT-Tiny": (75.1, 78.4, 92.3, 94.2),
                "PVT-Small": (79.9, 81.8, 95.0, 95.9),
                "PVT-Medium": (81.2, 83.0, 95.7, 96.4),
                "Swin-T": (81.2, 82.1, 95.5, 95.9),
                "PVTv2-B2": (82.0, 82.6, 95.9, 96.2),
                "PVTv2-B3": (83.2, 83.7, 96.3, 96.4),
                "PVTv2-B4": (83.6, 84.1, 96.3, 96.6),
            },
        ),
        Claim(
            "table2",
            "no cache, a cache of keys and values, a gated cache",
            f"{_TABLES}:table2",
            "A cache of keys and values of earlier batches adds nothing; a gated cache adds 1.4 to 3.3 points.",
            ("none", "attention-based", "GRC"),
            {"ViT-S": (79.9, 80.0, 81.3), "PVT-Tiny": (75.1, 74.8, 78.4), "PVT-Small": (79.9, 79.6, 81.8)},
        ),
        Claim(
            "table8",
            "ImageNet-22k",
            f"{_TABLES}:table8",
            "A cache adds 0.8 points to Swin-T.",
            ("top-1", "top-1 cached", "top-5", "top-5 cached"),
            {"Swin-T, 22k": (80.9, 81.7, 96.0, 96.4)},
        ),
        Claim(
            "table9",
            "throughput and FLOPs",
            f"{_TABLES}:table9",
            "A cache costs 10 to 15 % more FLOPs and 17 to 19 % of the throughput (V100).",
            ("train", "train cached", "test", "test cached", "G", "G cached"),
            {
                "PVT-Tiny": (313, 257, 930, 768, 1.90, 2.15),
                "PVT-Small": (181, 146, 689, 561, 3.80, 4.29),
                "PVT-Medium": (101, 84, 393, 319, 6.70, 7.61),
            },
        ),
        Claim(
            "table10",
            "caching ratio",
            f"{_TABLES}:table10",
            "Accuracy rises with the ratio, but gains little above 0.5.",
            ("G", "top-1"),
            {
                "0": (1.90, 75.1),
                "0.125": (1.93, 75.7),
                "0.25": (1.96, 76.8),
                "0.5": (2.15, 78.4),
                "1": (2.97, 78.5),
            },
        ),
    ),
)
