"""The attentions that the paper compares, by the names of its tables."""

from mnemos.attention.linear import LinearConfig
from mnemos.attention.lsh import LSHConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig

LSH_ROUNDS = (1, 4)
CHUNK, BUCKETS = 32, 64
ARMS = ("softmax", *(f"lsh-{rounds}" for rounds in LSH_ROUNDS), "linear")


def attention(arm: str, length: int) -> AttentionConfig:
    """The configuration of an arm, "softmax", "linear", or "lsh-R" with R hash rounds, for sequences of this length.

    LSH has the paper's 64 buckets of 783 tokens and more. Of shorter sequences it has one for every chunk of 32: with
    more, a token would meet next to nobody.
    """
    if arm.startswith("lsh-"):
        buckets = BUCKETS if length >= 783 else max(2, 2 * round(length / (2 * CHUNK)))
        return LSHConfig(rounds=int(arm.removeprefix("lsh-")), chunk=CHUNK, buckets=buckets)
    return LinearConfig() if arm == "linear" else SoftmaxConfig()
