"""The time of a training step of the Recurrent Memory Transformer, against a public implementation of the same shape.

    pip install --no-deps --target PEERS recurrent-memory-transformer-pytorch hyper-connections einops
    PYTHONPATH=PEERS python benchmarks/recurrent_memory.py [--shapes small wide] [--rounds 9] [--out FILE.json]

A step is forward and cross-entropy over four segments of bytes, gradients through all four, and fused AdamW, in one
thread. Both start from the memory after a segment. All variants of a shape are measured in each round, one after
the other in an order that rotates, by the CPU time of the thread (see segment_memories.py). A ratio is the median
over rounds of two times of one round, with its smallest and largest value; below 1 we are faster. GFLOP: forward,
as counted.

lucidrains: recurrent-memory-transformer-pytorch with learned positions and memory tokens that see their whole
group, with its own attention ("plain") and PyTorch's fused one ("fused"). Left out are its hyper-connections and
the keys and values of the segment before, detached, which the paper's model does not have. It has no biases,
RMSNorm, and a gated MLP with as many weights.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from command import command, write
from segment_memories import VOCABULARY, in_rotation, scored, seeded
from torch import nn

from mnemos.memory import TokensConfig
from mnemos.models import RMT

SEGMENTS = 4
Loss = Callable[[], torch.Tensor]


class Shape(NamedTuple):
    """Sizes of both models: segments of L tokens, m memory tokens."""

    dim: int
    layers: int
    heads: int
    segment: int
    memory: int
    rows: int


SHAPES = {"small": Shape(128, 4, 4, 64, 16, 8), "wide": Shape(512, 2, 8, 128, 32, 2)}


def tokens(shape: Shape) -> torch.Tensor:
    size = shape.rows, (SEGMENTS + 1) * shape.segment
    return torch.randint(VOCABULARY, size, generator=torch.Generator().manual_seed(0))


def ours(shape: Shape) -> tuple[Loss, nn.Module]:
    """This package's model."""
    model = RMT(
        vocab_size=VOCABULARY,
        dim=shape.dim,
        layers=shape.layers,
        num_heads=shape.heads,
        mlp=4 * shape.dim,
        segment=shape.segment,
        norm="pre",
        activation="gelu",
        position="learned",
        memory=TokensConfig(tokens=shape.memory),
    )
    first, rest = tokens(shape).tensor_split([shape.segment], 1)
    with torch.no_grad():
        _, state = model(first)
    return lambda: scored(model(rest, state)[0], rest), model


def lucidrains(shape: Shape, fused: bool) -> tuple[Loss, nn.Module]:
    """recurrent-memory-transformer-pytorch."""
    module = importlib.import_module("recurrent_memory_transformer_pytorch.recurrent_memory_transformer")
    model = module.RecurrentMemoryTransformer(
        shape.dim,
        num_tokens=VOCABULARY,
        depth=shape.layers,
        num_memory_tokens=shape.memory,
        seq_len=shape.segment,
        dim_head=shape.dim // shape.heads,
        heads=shape.heads,
        use_flash_attn=fused,
        use_xl_memories=False,
        emb_gradient_frac=1.0,
        num_residual_streams=1,
    )
    first, *rest = tokens(shape).split(shape.segment, 1)
    with torch.no_grad():
        _, start, _ = model(first)

    def loss() -> torch.Tensor:
        memory, total = start, torch.zeros(())
        for x in rest:
            logits, memory, _ = model(x, memory)
            total = total + scored(logits, x)
        return total / SEGMENTS

    return loss, model


VARIANTS = {"mnemos": ours, "plain": partial(lucidrains, fused=False), "fused": partial(lucidrains, fused=True)}


def assess(shape: Shape, rounds: int) -> dict[str, Any]:
    """The variants in rotation."""
    return in_rotation({name: seeded(make, shape) for name, make in VARIANTS.items()}, rounds)


def main() -> None:
    parser = command(__doc__, choices={"shapes": SHAPES}, shapes=list(SHAPES), rounds=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for name in options.shapes:
        print(name, SHAPES[name], flush=True)
        result[name] = assess(SHAPES[name], options.rounds)
    found = {"rounds": options.rounds, "threads": 1, "clock": "CPU time of the thread", "segments": SEGMENTS}
    shapes = {name: SHAPES[name]._asdict() for name in result}
    write(options.out, found | {"shapes": shapes, "models": result})


if __name__ == "__main__":
    main()
