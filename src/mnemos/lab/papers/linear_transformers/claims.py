"""The claims of "Transformers are RNNs", with the paper's own numbers only."""

from ..claim import Claim, Paper

_HERE = "mnemos.lab.papers.linear_transformers"

LINEAR_TRANSFORMERS = Paper(
    "linear_transformers",
    "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention (arXiv 2006.16236)",
    (
        Claim(
            "figure1",
            "time and memory of forward and backward pass by sequence length",
            f"{_HERE}.figures:figure1",
            "The cost of softmax grows quadratically with the length; that of linear attention and LSH grows linearly.",
        ),
        Claim(
            "figure2",
            "the copy task: loss by update",
            f"{_HERE}.figures:figure2",
            "Linear attention converges smoothly to the loss of softmax; LSH does not reach it.",
        ),
        Claim(
            "figure3",
            "MNIST images: unconditional samples and completions",
            f"{_HERE}.figures:figure3",
            "Samples have sharp boundaries and no noise; completions keep the stroke's style and width.",
        ),
        Claim(
            "table1",
            "MNIST byte by byte: bits/dim and images per second",
            f"{_HERE}.tables:likelihood_and_speed",
            "Linear attention is 0.023 bits behind softmax and generates 317 times as fast.",
            ("bits/dim", "images/s"),
            {
                "softmax": (0.621, 0.45),
                "softmax, cached": (0.621, 7.56),
                "lsh-1": (0.745, 0.68),
                "lsh-4": (0.676, 0.27),
                "linear": (0.644, 142.8),
            },
        ),
        Claim(
            "experiment",
            "MNIST byte by byte over seeds: linear, softmax and LSH-1, and how they are trained (Table 1)",
            f"{_HERE}.experiment:experiment",
            "Linear attention is 0.023 bits behind softmax and 0.101 ahead of LSH with one round.",
            ("bits/dim",),
            {"linear": (0.644,), "softmax": (0.621,), "lsh-1": (0.745,)},
        ),
        Claim(
            "cifar10",
            "CIFAR-10 byte by byte: bits/dim and images per second (Table 2)",
            f"{_HERE}.tables:likelihood_and_speed",
            "After equal training time, linear attention is better than softmax and generates 4,462 times as fast.",
            ("bits/dim", "images/s"),
            {
                "softmax": (3.47, 0.004),
                "softmax, cached": (3.47, 0.32),
                "lsh-1": (3.39, 0.015),
                "lsh-4": (3.51, 0.005),
                "linear": (3.40, 17.85),
            },
        ),
        Claim(
            "latency",
            "seconds to generate one MNIST image at batch size 1 on a CPU",
            f"{_HERE}.tables:latency",
            "Linear attention needs 5.5 s, softmax 72.6 s, and softmax with cached keys and values 7.4 s.",
            ("seconds",),
            {"softmax": (72.6,), "softmax, cached": (7.4,), "linear": (5.5,)},
        ),
        Claim(
            "constant_memory",
            "bytes of state by position, and many MNIST images generated at once",
            f"{_HERE}.tables:constant_memory",
            "Linear attention generates 10,000 images at once on one GPU with constant memory; softmax's memory grows.",
        ),
        Claim(
            "speech",
            "speech recognition with CTC (Table 3)",
            f"{_HERE}.tables:speech",
            "Linear attention is better than an LSTM and LSH, worse than softmax, and the fastest to train.",
            ("error rate", "seconds per epoch"),
            {
                "bilstm": (10.94, 1047.0),
                "softmax": (5.12, 2711.0),
                "lsh-4": (9.33, 2250.0),
                "linear": (8.08, 824.0),
            },
        ),
    ),
)
