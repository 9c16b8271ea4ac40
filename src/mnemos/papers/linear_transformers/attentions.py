"""The attentions that the paper compares, by the names of its tables."""

from mnemos.attention.linear import LinearConfig
from mnemos.attention.lsh import LSHConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig

LSH_ROUNDS = (1, 4)
CHUNK, BUCKETS = 32, 64
NAMES = ("softmax", *(f"lsh-{rounds}" for rounds in LSH_ROUNDS), "linear")


def attention(name: str, length: int) -> AttentionConfig:
    """The configuration of "softmax", "linear", or "lsh-R" with R hash rounds, for sequences of `length` tokens.

    LSH has the paper's 64 buckets for 783 tokens and more. For shorter sequences it has one bucket per chunk of 32:
    with more, a token would share its bucket with hardly any other.
    """
    if name.startswith("lsh-"):
        buckets = BUCKETS if length >= 783 else max(2, 2 * round(length / (2 * CHUNK)))
        return LSHConfig(rounds=int(name.removeprefix("lsh-")), chunk=CHUNK, buckets=buckets)
    return LinearConfig() if name == "linear" else SoftmaxConfig()
