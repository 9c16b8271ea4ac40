"""The claims of Memformer, with the paper's own numbers only, and one claim of this library: long-range recall."""

from ..claim import Claim, Paper

_HERE = "mnemos.lab.papers.memformer"

MEMFORMER = Paper(
    "memformer",
    "Memformer: A Memory-Augmented Transformer for Sequence Modeling (arXiv 2010.06891)",
    (
        Claim(
            "table1",
            "MNIST byte by byte: FLOPs and perplexity, with ablations",
            f"{_HERE}.tables:table1",
            "Memformer is the best model, with a tenth of the FLOPs of the best Transformer-XL. Every component "
            "contributes. Medians of three runs.",
            ("GFLOP", "perplexity"),
            {
                "LSTM": (52.5, 1.698),
                "Transformer decoder": (41.3, 1.569),
                "Transformer-XL memory=56": (5.6, 1.650),
                "Transformer-XL memory=224": (15.6, 1.618),
                "Transformer-XL memory=784": (49.1, 1.611),
                "Memformer 4+8": (5.0, 1.555),
                "Memformer 2+6 memory=64": (3.9, 1.594),
                "Memformer 2+6 memory=32": (3.9, 1.600),
                "Memformer 2+6 memory=16": (3.9, 1.604),
                "Memformer 2+6 memory=1": (3.9, 1.627),
                "Memformer 4+4": (3.6, 1.628),
                "w/o memory": (1.8, 1.745),
                "temperature=1.0": (3.9, 1.612),
                "w/o forgetting": (3.9, 1.630),
                "w/o multi-head": (3.9, 1.626),
            },
        ),
        Claim(
            "table2",
            "language modelling: FLOPs, perplexity, and inference compared with Transformer-XL",
            f"{_HERE}.tables:table2",
            "Memformer has the best perplexity, with a third of the FLOPs of Transformer-XL with as large a memory. It "
            "is 3.2 times as fast.",
            ("GFLOP", "perplexity"),
            {
                "Transformer-XL base memory=1600": (250.0, 23.95),
                "Transformer-XL base memory=1024": (168.0, 23.67),
                "Transformer-XL base memory=512": (94.0, 23.94),
                "Transformer-XL base memory=256": (58.0, 25.39),
                "Transformer-XL base memory=128": (39.0, 25.60),
                "Transformer-XL base memory=32": (26.0, 27.22),
                "Compressive Transformer memory=512 compress=512": (172.0, 23.23),
                "Memformer 4+16": (54.0, 22.74),
                "Memformer 4+12": (48.0, 23.91),
                "Memformer memory=512": (35.0, 23.30),
                "Memformer w/o memory": (31.0, 25.57),
            },
        ),
        Claim(
            "table3",
            "back-propagation through time, gradient checkpointing and memory replay",
            f"{_HERE}.tables:table3",
            "Replay needs less than half of the memory of back-propagation through time, at 0.90 of its speed.",
            ("MB", "relative speed"),
            {"BPTT": (16177.0, 1.00), "GC": (9885.0, 0.48), "MRBP": (7229.0, 0.90)},
        ),
        Claim(
            "figure4",
            "forgetting: the drift of a slot without input to its terminal state",
            f"{_HERE}.figures:figure4",
            "A slot near its terminal state is forgotten quickly; a slot opposite to it is forgotten slowly.",
        ),
        Claim(
            "figure5",
            "FLOPs by sequence length, and bytes by memory size",
            f"{_HERE}.figures:figure5",
            "The FLOPs of Memformer grow linearly with the length. With a large memory the model takes 8.1 times less "
            "memory than Transformer-XL.",
        ),
        Claim(
            "figure6",
            "three kinds of slots: they hold, mix or are overwritten",
            f"{_HERE}.figures:figure6",
            "In the middle of a document, 60 to 80 % of the slots hold their contents and 5 to 10 % are overwritten.",
        ),
        Claim(
            "figure7",
            "the words that a slot attends to",
            f"{_HERE}.figures:figure7",
            "A slot that is overwritten attends to named entities and verbs.",
        ),
        Claim(
            "figure8",
            "perplexity by time horizon and by number of slots",
            f"{_HERE}.figures:figure8",
            "A horizon of 1 is the worst, longer ones are better, and at 32 almost nothing is gained any more; most of "
            "the gain from slots is between 1 and 8.",
        ),
        Claim(
            "experiment",
            "MNIST at 14 x 14: Memformer, its ablations and an equal Transformer-XL over seeds (Table 1, Figure 6)",
            f"{_HERE}.experiment:experiment",
            "Memory and forgetting lower the perplexity, and Memformer is ahead of Transformer-XL; 60 to 80 % of the "
            "slots hold.",
            ("perplexity",),
            {
                "Memformer": (1.594,),
                "without memory": (1.745,),
                "without forgetting": (1.630,),
                "Transformer-XL": (1.611,),
            },
        ),
        Claim(
            "recall",
            "recall of a fact after 32 segments (not in the paper: a claim of this library)",
            f"{_HERE}.tables:recall",
            "Slots carry information from the distant past. With a horizon of 1, no gradient passes through them.",
        ),
    ),
)
