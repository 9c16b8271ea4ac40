"""Transformers on small tasks of tokens: copying, associative recall, and images of digits pixel by pixel."""

from mnemos.attention.linear import LinearConfig
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.tasks.copying import CopyConfig
from mnemos.lab.tasks.images import DigitsConfig, MNISTConfig
from mnemos.lab.tasks.recall import RecallConfig
from mnemos.models.transformer import HeadConfig, TransformerConfig

_OPTIM = OptimConfig(lr=1e-3, schedule=ScheduleConfig(name="cosine", warmup=100))


@recipe
def copy() -> Recipe:
    """Copy a word of 32 to 63 symbols, linear attention (Linear transformers, Figure 2)."""
    return Recipe(
        model=TransformerConfig.classic(
            vocab_size=0, dim=256, layers=4, num_heads=8, mlp=1024, max_length=0, attention=LinearConfig()
        ),
        data=CopyConfig(),
        optim=OptimConfig(
            name="radam",
            lr=1e-3,
            weight_decay=0.0,
            grad_clip=0.0,  # the paper names none
            schedule=ScheduleConfig(name="step", drop_at=3000, floor=0.1),
        ),
        train=TrainConfig(steps=5000, batch_size=64),
    )


@recipe
def recall() -> Recipe:
    """Associative recall: find the value that was paired with a key."""
    return Recipe(
        model=TransformerConfig.classic(vocab_size=0, max_length=0),
        data=RecallConfig(),
        optim=_OPTIM,
        train=TrainConfig(steps=2000, batch_size=64),
    )


@recipe
def digits() -> Recipe:
    """Classify scikit-learn's 1,797 digits, each as 64 tokens."""
    return Recipe(
        model=TransformerConfig.classic(
            vocab_size=0, dim=64, mlp=128, max_length=0, causal=False, head=HeadConfig(classes=10)
        ),
        data=DigitsConfig(),
        optim=_OPTIM,
        train=TrainConfig(steps=1000, batch_size=32),
    )


@recipe
def mnist() -> Recipe:
    """Classify MNIST, each image as 784 tokens, with linear attention (--data.path FOLDER with the idx files)."""
    return Recipe(
        model=TransformerConfig.classic(
            vocab_size=0,
            dim=64,
            mlp=128,
            max_length=0,
            causal=False,
            attention=LinearConfig(),
            head=HeadConfig(classes=10),
        ),
        data=MNISTConfig(),
        optim=_OPTIM,
        train=TrainConfig(steps=2000, batch_size=32),
    )
