"""The attentions that the paper compares, by the names of its tables."""

from mnemos.attention.linear import LinearConfig
from mnemos.attention.reformer import ReformerConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig

LSH_ROUNDS = (1, 4)
NAMES = ("softmax", *(f"lsh-{rounds}" for rounds in LSH_ROUNDS), "linear")
# The paper's chunks for images of MNIST (27 chunks) and CIFAR-10 (83), each with 64 buckets.
PAPER_CHUNKS = {783: 29, 3071: 37}
PAPER_BUCKETS = 64


def attention(name: str, length: int) -> AttentionConfig:
    """The configuration of "softmax", "linear", or "lsh-R", for sequences of `length` tokens.

    lsh-R is the Reformer's attention, as published, with R hash rounds: at the paper's two lengths in its chunks and
    with its 64 buckets, at other lengths in chunks of 32 and with twice as many buckets as chunks.
    """
    if name.startswith("lsh-"):
        rounds = int(name.removeprefix("lsh-"))
        if length in PAPER_CHUNKS:
            return ReformerConfig(rounds, PAPER_CHUNKS[length], PAPER_BUCKETS)
        return ReformerConfig(rounds)
    return LinearConfig() if name == "linear" else SoftmaxConfig()
