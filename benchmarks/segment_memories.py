"""The time of a training step of Transformer-XL and the Compressive Transformer, against public implementations.

    python benchmarks/segment_memories.py [--shapes small wide] [--rounds 9] [--out FILE.json]

The public ones are not among this package's extras. With their dependencies left out they need:

    pip install --no-deps --target PEERS compressive-transformer-pytorch mogrifier einops labml-nn labml-helpers labml
    PYTHONPATH=PEERS python benchmarks/segment_memories.py

A step is forward, cross-entropy, auxiliary loss, backward and fused AdamW, on a segment of bytes whose memory is full,
in one thread. All models of a shape are measured in each round, one after the other in an order that rotates. The clock
is the CPU time of the thread, which other programs disturb less than the wall's. A ratio is the median over rounds of
two times of one round, with its smallest and largest value; below 1 we are faster. GFLOP: forward, as counted.

lucidrains: its layers with plain residuals, learned distances in place of projected sinusoids, and no u and v: less
work. Without compressed memory it is a Transformer-XL. From its first compression in training mode on, it gives the
projection of keys and values no gradient, which saves it a product per layer; "keys trained" is the same with that
gradient, which is what the model needs. labml: Transformer-XL with learned distances, and u.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from command import command, write
from torch import nn
from torch.nn import functional as F

import mnemos
from mnemos.attention import CompressiveConfig, RelativeConfig
from mnemos.lab.measure.flops import count_flops
from mnemos.lab.measure.timing import race

VOCABULARY, RATIO = 256, 4
LEAST = 0.2  # seconds per measurement
Step = Callable[[], object]


class Shape(NamedTuple):
    """Sizes of all models: a segment of T tokens, a memory of as many tokens as there are compressed slots."""

    dim: int
    layers: int
    heads: int
    segment: int
    memory: int
    rows: int


SHAPES = {"small": Shape(128, 4, 4, 128, 128, 8), "wide": Shape(512, 2, 8, 128, 512, 2)}


def trained(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Step:
    """One update by the gradient of `loss`."""
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step() -> None:
        loss().backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def scored(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), x.flatten())


def ours(shape: Shape, compressive: bool) -> tuple[Callable[[], torch.Tensor], nn.Module]:
    """This package's model."""
    memory = {"memory": shape.memory}
    attention = (
        CompressiveConfig(**memory, compressed=shape.memory, ratio=RATIO) if compressive else RelativeConfig(**memory)
    )
    model = mnemos.TransformerConfig.classic(
        vocab_size=VOCABULARY,
        dim=shape.dim,
        layers=shape.layers,
        num_heads=shape.heads,
        mlp=4 * shape.dim,
        position="none",
        attention=attention,
    ).build()
    state, x = None, tokens(shape)
    with torch.no_grad():
        for _ in range(segments(shape, compressive)):
            _, state = model(x, state)

    def loss() -> torch.Tensor:
        with mnemos.collect_auxiliary_losses() as auxiliary:
            logits, _ = model(x, state)
        return scored(logits, x) + sum(auxiliary) / shape.layers

    return loss, model


def lucidrains(
    shape: Shape, compressive: bool, trains_keys: bool = False
) -> tuple[Callable[[], torch.Tensor], nn.Module]:
    """compressive-transformer-pytorch; trains_keys: with the gradient of keys and values that it cuts."""
    module = importlib.import_module("compressive_transformer_pytorch.compressive_transformer_pytorch")
    model = module.CompressiveTransformer(
        num_tokens=VOCABULARY,
        dim=shape.dim,
        seq_len=shape.segment,
        depth=shape.layers,
        mem_len=shape.memory,
        cmem_len=shape.memory,
        cmem_ratio=RATIO,
        heads=shape.heads,
        gru_gated_residual=False,
        enhanced_recurrence=False,
    )
    if not compressive:  # a layer without compressed memory ends before it compresses
        for part in model.modules():
            if isinstance(part, module.SelfAttention):
                part.cmem_len = 0
                part.compress_mem_fn = nn.Identity()
    memories, x = None, tokens(shape)
    with torch.no_grad():
        for _ in range(segments(shape, compressive)):
            _, memories, _ = model(x, memories)

    cut = [part.to_kv.weight for part in model.modules() if isinstance(part, module.SelfAttention)]

    def loss() -> torch.Tensor:
        for weight in cut:
            weight.requires_grad_(trains_keys or weight.requires_grad)
        logits, _, auxiliary = model(x, memories)
        for weight in cut:  # the forward has cut it again
            weight.requires_grad_(trains_keys or weight.requires_grad)
        return scored(logits, x) + auxiliary

    return loss, model


def labml(shape: Shape, compressive: bool) -> tuple[Callable[[], torch.Tensor], nn.Module]:
    """labml-nn's Transformer-XL, with an embedding and a head."""
    assert not compressive
    importlib.import_module("labml.tracker").debug = lambda *_: None  # labml-nn 0.5 calls it, labml 0.5 has it no more
    xl = importlib.import_module("labml_nn.transformers.xl")
    attention = importlib.import_module("labml_nn.transformers.xl.relative_mha").RelativeMultiHeadAttention
    feed_forward = importlib.import_module("labml_nn.transformers.feed_forward").FeedForward
    layer = xl.TransformerXLLayer(
        d_model=shape.dim,
        self_attn=attention(shape.heads, shape.dim, 0.0),
        feed_forward=feed_forward(shape.dim, 4 * shape.dim, 0.0, nn.GELU()),
        dropout_prob=0.0,
    )
    core = xl.TransformerXL(layer, shape.layers)
    model = nn.ModuleList([nn.Embedding(VOCABULARY, shape.dim), core, nn.Linear(shape.dim, VOCABULARY)])
    x = tokens(shape).T
    memory = [torch.randn(shape.memory, shape.rows, shape.dim) for _ in range(shape.layers)]
    mask = torch.ones(shape.segment, shape.memory + shape.segment).tril(shape.memory)[..., None]

    def loss() -> torch.Tensor:
        y, _ = core(model[0](x), memory, mask)
        return scored(model[2](y), x)

    return loss, model


def tokens(shape: Shape) -> torch.Tensor:
    return torch.randint(VOCABULARY, (shape.rows, shape.segment), generator=torch.Generator().manual_seed(0))


def segments(shape: Shape, compressive: bool) -> int:
    """Calls until the memory is full."""
    return -(-shape.memory * (1 + RATIO * compressive) // shape.segment)


MODELS = {
    "Transformer-XL": {"mnemos": ours, "lucidrains": lucidrains, "labml": labml},
    "Compressive": {
        "mnemos": ours,
        "lucidrains": lucidrains,
        "lucidrains, keys trained": partial(lucidrains, trains_keys=True),
    },
}


def in_rotation(made: Mapping[str, tuple[Callable[[], torch.Tensor], nn.Module]], rounds: int) -> dict[str, Any]:
    """Size, FLOPs and CPU time of training steps by implementation, measured in rotation; prints a line for each."""
    steps, row = {}, {}
    for name, (loss, model) in made.items():
        model.train()
        with torch.no_grad():
            gflop = count_flops(partial(loss)) / 1e9
        row[name] = {"parameters": sum(p.numel() for p in model.parameters()), "GFLOP": gflop}
        steps[name] = trained(model, loss)
    times = race(steps, rounds, time.thread_time, LEAST)
    for name in steps:
        ratios = [a / b for a, b in zip(times["mnemos"], times[name], strict=True)]
        row[name] |= {
            "seconds": statistics.median(times[name]),
            "mnemos by this": statistics.median(ratios),
            "range": [min(ratios), max(ratios)],
        }
        print(
            f"{name:24} {row[name]['parameters']:>9,} parameters {row[name]['GFLOP']:7.2f} GFLOP "
            f"{1e3 * row[name]['seconds']:8.1f} ms   mnemos takes {row[name]['mnemos by this']:.2f} of its time "
            f"({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
    return row


def seeded(make: Callable[..., Any], *arguments: object) -> Any:
    """`make(*arguments)` with the weights of seed 0."""
    torch.manual_seed(0)
    return make(*arguments)


def assess(shape: Shape, kind: str, rounds: int) -> dict[str, Any]:
    """The implementations of one model in rotation."""
    print(kind, flush=True)
    made = {name: seeded(make, shape, kind == "Compressive") for name, make in MODELS[kind].items()}
    return in_rotation(made, rounds)


def main() -> None:
    parser = command(__doc__, choices={"shapes": SHAPES}, shapes=list(SHAPES), rounds=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for name in options.shapes:
        print(name, SHAPES[name], flush=True)
        result[name] = {kind: assess(SHAPES[name], kind, options.rounds) for kind in MODELS}
    found = {"rounds": options.rounds, "threads": 1, "clock": "CPU time of the thread", "ratio": RATIO}
    shapes = {name: SHAPES[name]._asdict() for name in result}
    write(options.out, found | {"shapes": shapes, "models": result})


if __name__ == "__main__":
    main()
