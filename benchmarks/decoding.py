"""Decoding token by token: `mnemos.fused_step` compared with the plain model, softmax, a peer, and reading weights.

    python benchmarks/decoding.py [--batches 1 16 64 256] [--rounds 9] [--stream 10000] [--out FILE]

The model has 8 layers with 8 heads of width 32, width 256 and feed-forward width 1024. First, all implementations of
the same computation must agree. A round times each of them once, in an order that rotates. There are two tables:

- the time per token at several batch sizes, and the time to read the weights once (the sum of all parameters);
- the time per token after 1, 1,000 … 1,000,000 tokens. The states up to `--stream` tokens come from a real stream;
  later ones are its last state with sums and token count scaled up (none with --stream 1000000).

For whole images per second, compared with softmax with and without a cache, use
mnemos reproduce linear_transformers/table1.

The peer, pytorch-fast-transformers, is included if it is installed. Only its recurrent encoder is timed, without
embedding, positions and head; our times include them.
"""

import importlib.util
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from command import cells, command, summary, write
from torch import Tensor, nn

import mnemos
from mnemos import Transformer
from mnemos.attention.linear import LinearConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.lab.measure.timing import race
from mnemos.ops.positions import sinusoids
from mnemos.types import map_state

VOCABULARY, LAYERS, HEADS, WIDTH, MLP = 256, 8, 8, 256, 1024
CACHED = (200, 784)  # tokens in softmax's cache
AGES = (1, 10**3, 10**4, 10**5, 10**6)
OF = "of fused's time"
Run = Callable[[], Any]


def build(attention: Any, norm: str = "pre") -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "dim": WIDTH, "layers": LAYERS, "num_heads": HEADS, "mlp": MLP}
    config = mnemos.TransformerConfig.classic(attention=attention, norm=norm, max_length=1024, **sizes)
    return Transformer(config).eval()


def tokens(rows: int, count: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(0))


def peer(ours: Transformer | None = None) -> nn.Module:
    """The recurrent encoder of fast-transformers, with the weights of `ours`, which must be a post-norm model."""
    from fast_transformers.builders import RecurrentEncoderBuilder

    sizes = {"n_layers": LAYERS, "n_heads": HEADS, "query_dimensions": WIDTH // HEADS}
    sizes |= {"value_dimensions": WIDTH // HEADS, "feed_forward_dimensions": MLP}
    kinds = {"attention_type": "linear", "activation": "gelu", "final_normalization": False}
    encoder = RecurrentEncoderBuilder.from_kwargs(**sizes, **kinds).get().eval()
    for block, layer in zip(ours.blocks if ours else (), encoder.layers, strict=bool(ours)):
        a, b = layer.attention, block.attention
        inner = (a.query_projection, a.key_projection, a.value_projection)
        for part, weight, bias in zip(inner, b.qkv.weight.chunk(3), b.qkv.bias.chunk(3), strict=True):
            part.load_state_dict({"weight": weight, "bias": bias})
        a.out_projection.load_state_dict(b.output.state_dict())
        pairs = [(layer.linear1, block.mlp.expand), (layer.linear2, block.mlp.contract)]
        for theirs, mine in [*pairs, (layer.norm1, block.attention_norm), (layer.norm2, block.mlp_norm)]:
            theirs.load_state_dict(mine.state_dict())
    return encoder


def check() -> None:
    """Compare the fused step with the model in float64, for both norms, and the peer with the model it copies."""
    for norm, rows in itertools.product(("pre", "post"), (1, 16)):
        model = build(LinearConfig(), norm)
        exact = build(LinearConfig(), norm).double()
        exact.load_state_dict(model.state_dict())
        step, x = mnemos.fused_step(model), tokens(rows, 50)
        assert step.fused, step.why
        theirs = peer(model) if norm == "post" and importlib.util.find_spec("fast_transformers") else None
        wanted, _ = exact(x)
        state = memory = None
        for i in range(50):
            found, state = step(x[:, i : i + 1], state)
            torch.testing.assert_close(found[:, 0].double(), wanted[:, i], rtol=0, atol=1e-5)
            if theirs is not None:
                y, memory = theirs(model.embedding(x[:, i]) + sinusoids(torch.arange(50), WIDTH)[i], state=memory)
                torch.testing.assert_close(model.head(y).double(), wanted[:, i], rtol=0, atol=1e-4)


def streaming(step: Callable[..., Any], rows: int) -> Run:
    """A function that decodes the next token of a stream."""
    x, state = tokens(rows), None

    def run() -> None:
        nonlocal state
        _, state = step(x, state)

    return run


def recurrent(encoder: nn.Module, rows: int) -> Run:
    x, memory = torch.randn(rows, WIDTH), None

    def run() -> None:
        nonlocal memory
        _, memory = encoder(x, state=memory)

    return run


def cached(model: Transformer, rows: int, length: int) -> Run:
    """A function that decodes a token after about `length` tokens; every 32 tokens it restarts from length − 16."""
    x, (_, start) = tokens(rows), model(tokens(rows, max(1, length - 16)))
    state, steps = start, 0

    def run() -> None:
        nonlocal state, steps
        if steps % 32 == 0:
            state = start
        _, state = model(x, state)
        steps += 1

    return run


def token(rows: int, rounds: int) -> dict[str, Any]:
    """The time per token at one batch size."""
    model, softmax = build(LinearConfig()), build(SoftmaxConfig())
    parameters = list(model.parameters())
    runs = {"fused": streaming(mnemos.fused_step(model), rows), "plain": streaming(model, rows)}
    runs["reading the weights"] = lambda: [p.sum() for p in parameters]
    if importlib.util.find_spec("fast_transformers"):
        runs["fast-transformers"] = recurrent(peer(), rows)
    # With larger batches the time is dominated by memory traffic of the caches.
    for length in CACHED if rows <= 16 else ():
        runs[f"softmax, {length} cached"] = cached(softmax, rows, length)
    row = {"batch": rows, **summary(race(runs, rounds), "fused", OF)}
    print(f"batch {rows:4}  {cells(row, OF)}", flush=True)
    return row


def flatness(rows: int, rounds: int, stream: int) -> dict[str, Any]:
    """The time per token after different numbers of tokens."""
    step, x, state, states = mnemos.fused_step(build(LinearConfig())), tokens(rows), None, {}
    for age in range(1, min(stream, max(AGES)) + 1):
        _, state = step(x, state)
        if age in AGES:
            states[age] = state
    last = max(states)
    for age in AGES:
        if age not in states:
            grown = map_state(lambda s, by=age // last: s * by, states[last])
            states[age] = grown._replace(seen=torch.full((rows,), age))
    times = race({str(age): lambda s=s: step(x, s) for age, s in states.items()}, rounds)
    row = {"batch": rows, "streamed up to": last, **summary(times, "1", first := "of the first's time")}
    print(f"batch {rows:4}  after {cells(row, first)}  (streamed up to {last}; scaled sums beyond)", flush=True)
    return row


@torch.no_grad()
def main() -> None:
    parser = command(__doc__, batches=[1, 16, 64, 256], rounds=9, threads=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--flat", type=int, nargs="*", default=[1, 16], help="batch sizes for the table by number of tokens"
    )
    parser.add_argument("--stream", type=int, default=10_000, help="tokens that are really decoded for it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    check()
    if not importlib.util.find_spec("fast_transformers"):
        print("fast-transformers is not installed and is left out")
    size = sum(p.numel() for p in build(LinearConfig()).parameters())
    found: dict[str, Any] = {"rounds": options.rounds, "parameters": size}
    found["token"] = [token(rows, options.rounds) for rows in options.batches]
    found["flat"] = [flatness(rows, options.rounds, options.stream) for rows in options.flat]
    write(options.out, found)


if __name__ == "__main__":
    main()
