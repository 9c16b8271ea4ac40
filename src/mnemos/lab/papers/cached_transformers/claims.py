"""The claims of Cached Transformers, with the paper's own numbers only."""

from ..claim import Claim, Paper

_HERE = "mnemos.lab.papers.cached_transformers"
_BOXES = ("APb", "APb50", "APb75", "APm", "APm50", "APm75")
_SIZES = ("AP", "AP50", "AP75", "APS", "APM", "APL")

CACHED_TRANSFORMERS = Paper(
    "cached_transformers",
    "Cached Transformers: Improving Transformers with Differentiable Memory Cache (arXiv 2312.12742)",
    (
        Claim(
            "figure1",
            "accuracy by FLOPs, with and without a cache",
            f"{_HERE}.figures:figure1",
            "At equal FLOPs, cached models are more accurate than their baselines.",
        ),
        Claim(
            "figure4",
            "o_self and o_mem of a middle layer, as images",
            f"{_HERE}.figures:figure4",
            "o_mem shows what the images of a class have in common, o_self what is particular to an image.",
        ),
        Claim(
            "figure5",
            "σ(λ) by layer and head",
            f"{_HERE}.figures:figure5",
            "σ(λ) > 0.5 in more than half of the layers; it is lower in the last layers.",
        ),
        Claim(
            "table1",
            "image classification, with and without a cache",
            f"{_HERE}.tables:classification",
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
            f"{_HERE}.tables:table2",
            "A cache of keys and values of earlier batches adds −0.3 to +0.1 points, a gated cache 1.4 to 3.3.",
            ("none", "attention-based", "GRC"),
            {"ViT-S": (79.9, 80.0, 81.3), "PVT-Tiny": (75.1, 74.8, 78.4), "PVT-Small": (79.9, 79.6, 81.8)},
        ),
        Claim(
            "experiment",
            "CIFAR-10 over seeds: a cache beside no cache, equal parameters, a constant, keys and values; and the gap",
            f"{_HERE}.experiment:experiment",
            "A gated cache adds 1.4 points to ViT-S, one of keys and values 0.1; it regularises across samples.",
            ("none", "attention-based", "GRC"),
            {"ViT-S": (79.9, 80.0, 81.3)},
        ),
        Claim(
            "table3",
            "object detection: Mask R-CNN on COCO",
            f"{_HERE}.tables:detection",
            "A cache in the backbone adds 3.2 to 4.7 points of AP for boxes and for masks.",
            _BOXES,
            {
                "PVT-Tiny": (36.7, 59.2, 39.3, 35.1, 56.7, 37.3),
                "PVT-Tiny, cached": (41.0, 63.4, 44.8, 38.3, 60.4, 41.1),
                "PVT-Small": (40.4, 62.9, 43.8, 36.3, 60.1, 40.3),
                "PVT-Small, cached": (44.5, 67.1, 48.6, 41.0, 64.0, 44.1),
                "PVT-Medium": (42.0, 64.4, 45.6, 39.0, 61.6, 42.1),
                "PVT-Medium, cached": (46.6, 68.2, 51.0, 42.3, 65.3, 45.5),
            },
        ),
        Claim(
            "table4",
            "translation: BLEU on IWSLT14 and IWSLT15",
            f"{_HERE}.sequence_tables:table4",
            "A cache in the encoder adds 0.2 to 0.6 BLEU in each of six tracks.",
            ("14 De-En", "14 Es-En", "14 En-Fr", "15 De-En", "15 En-Vi", "15 Cs-En"),
            {
                "Transformer": (35.5, 41.4, 41.5, 36.1, 29.8, 28.8),
                "Transformer, cached": (36.0, 41.8, 41.7, 36.3, 30.2, 29.4),
            },
        ),
        Claim(
            "table5",
            "language modelling: test perplexity by words on WikiText-103",
            f"{_HERE}.sequence_tables:table5",
            "A gated cache lowers the perplexity of Transformer-XL by 1.1 (base) and 0.4 (large).",
            ("perplexity",),
            {
                "Transformer-XL base": (24.0,),
                "Transformer-XL base, MT-cached": (23.99,),
                "Transformer-XL base, RMT-cached": (23.95,),
                "Transformer-XL base, cached": (22.9,),
                "Transformer-XL large": (18.3,),
                "Transformer-XL large, cached": (17.9,),
            },
        ),
        Claim(
            "table6",
            "Long ListOps: accuracy of three models, with and without a cache",
            f"{_HERE}.sequence_tables:table6",
            "A cache adds 1.2 points to a Transformer, 1.4 to BigBird and 0.6 to Reformer.",
            ("accuracy", "accuracy cached"),
            {"Transformer": (36.23, 37.40), "BigBird": (36.06, 37.45), "Reformer": (37.27, 37.85)},
        ),
        Claim(
            "table7",
            "object detection: RetinaNet on COCO",
            f"{_HERE}.tables:detection",
            "A cache in the backbone adds 3.5 to 3.8 points of AP.",
            _SIZES,
            {
                "PVT-Tiny": (36.7, 56.9, 38.9, 22.6, 38.8, 50.0),
                "PVT-Tiny, cached": (40.2, 61.1, 43.1, 25.0, 43.7, 53.4),
                "PVT-Small": (40.4, 61.3, 43.0, 25.0, 42.9, 55.7),
                "PVT-Small, cached": (44.0, 65.4, 47.4, 29.7, 47.7, 57.5),
                "PVT-Medium": (41.9, 63.1, 44.3, 25.0, 44.9, 57.6),
                "PVT-Medium, cached": (45.7, 67.1, 49.1, 29.0, 49.3, 60.2),
            },
        ),
        Claim(
            "table8",
            "ImageNet-22k",
            f"{_HERE}.tables:classification",
            "A cache adds 0.8 points to Swin-T.",
            ("top-1", "top-1 cached", "top-5", "top-5 cached"),
            {"Swin-T, 22k": (80.9, 81.7, 96.0, 96.4)},
        ),
        Claim(
            "table9",
            "throughput and FLOPs",
            f"{_HERE}.tables:table9",
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
            f"{_HERE}.tables:table10",
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
        Claim(
            "costs",
            "parameters and FLOPs that a cache adds, with both lengths",
            f"{_HERE}.tables:added_costs",
            "At ratio 0.5 a cache costs about 10 to 15 % more FLOPs and parameters.",
        ),
    ),
)
