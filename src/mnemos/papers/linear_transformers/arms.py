"""The attentions that the paper compares, by the names of its tables."""

from mnemos.attention.linear import LinearConfig
from mnemos.attention.lsh import LSHConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig

LSH_ROUNDS = (1, 4)
ARMS = ("softmax", *(f"lsh-{rounds}" for rounds in LSH_ROUNDS), "linear")


def attention(arm: str) -> AttentionConfig:
    """The configuration of an arm: "softmax", "linear", or "lsh-R" with R hash rounds."""
    if arm.startswith("lsh-"):
        return LSHConfig(rounds=int(arm.removeprefix("lsh-")))
    return LinearConfig() if arm == "linear" else SoftmaxConfig()
