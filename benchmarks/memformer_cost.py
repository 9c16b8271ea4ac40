"""Costs of a Memformer: the critical path's share of a training step, and time and state bytes per token of a stream.

    python benchmarks/memformer_cost.py --out results/memformer_cost.json

The model is the paper's language model with 4 encoder and 16 decoder layers, at a smaller width. FLOPs at the full
width are counted without running it. First, the state of `advance` is compared with that of a forward pass, and a
stream read token by token with the same stream read at once.
"""

import argparse
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mnemos.atomic import write_json
from mnemos.lab.measure.flops import count_flops
from mnemos.lab.measure.gradients import state_bytes
from mnemos.lab.measure.timing import race, ratio
from mnemos.lab.run.provenance import provenance
from mnemos.memory.slots import SlotsConfig
from mnemos.models.memformer import Memformer, MemformerConfig
from mnemos.types import leaves

PAPER = {"encoder_layers": 4, "decoder_layers": 16, "segment": 128, "num_heads": 8, "vocab_size": 256}


def build(width: int, slots: int, **fields: Any) -> Memformer:
    torch.manual_seed(0)
    memory = SlotsConfig(slots=slots, temperature=0.125)
    return MemformerConfig(**PAPER, dim=width, mlp=4 * width, memory=memory, **fields).build().eval()


@torch.no_grad()
def check(model: Memformer) -> None:
    x = torch.randint(256, (1, 2 * PAPER["segment"] + 3))
    whole, _ = model(x)
    logits, state = model(x[:, :256])
    if not all(torch.equal(a, b) for a, b in zip(leaves(model.advance(x[:, :256])), leaves(state), strict=True)):
        raise SystemExit("advance and forward return different states; nothing was timed")
    parts = [logits]
    for token in x[:, 256:].T:
        y, state = model(token[None], state)
        parts.append(y)
    if not torch.allclose(torch.cat(parts, 1), whole, atol=1e-4):
        raise SystemExit("reading token by token differs from reading at once; nothing was timed")


def share(model: Memformer, rows: int, rounds: int) -> dict[str, Any]:
    """The share f of encoder and writer in a forward pass, in time and FLOPs; the share of the forward in a step."""
    x = torch.randint(256, (rows, PAPER["segment"]))
    with torch.no_grad():
        _, state = model(x)
        flops = {name: count_flops(partial(run, x, state)) for name, run in calls(model).items()}
        times = race({name: partial(run, x, state) for name, run in calls(model).items()}, rounds)

    def step() -> None:
        model.zero_grad()
        model(x, state)[0].square().mean().backward()

    def forward() -> None:
        with torch.no_grad():
            model(x, state)

    whole = race({"step": step, "forward": forward}, max(3, rounds // 2))
    return {
        "rows": rows,
        "share_of_flops": flops["advance"] / flops["forward"],
        "share_of_time": ratio(times, "advance", "forward"),
        "forward_seconds": median(times["forward"]),
        "forward_of_step": ratio(whole, "forward", "step"),
    }


def calls(model: Memformer) -> dict[str, Any]:
    return {"forward": model, "advance": model.advance}


@torch.no_grad()
def token(model: Memformer, rounds: int) -> dict[str, Any]:
    """Time and state bytes per token of a stream with one row, over whole segments (one encoder call per segment)."""
    length = PAPER["segment"]
    x = torch.randint(256, (1, length))
    _, start = model(x)
    sizes: list[int] = []

    def segment() -> None:
        state = start
        for i in range(length):
            _, state = model(x[:, i : i + 1], state)
            if len(sizes) < length:
                sizes.append(state_bytes(state))

    times = race({"segment": segment}, rounds)["segment"]
    return {
        "seconds_a_token": median(times) / length,
        "state_bytes_at_a_segments_start": state_bytes(start),
        "state_bytes_at_most": max(sizes),
        "slots_bytes": start.memory.slots.numel() * 4,
    }


def full_size(slots: int) -> dict[str, float]:
    """FLOPs of a segment at the paper's width, counted from shapes: the total, and the share of the critical path."""
    with torch.device("meta"):
        model = build(512, slots)
        x = torch.zeros(1, PAPER["segment"], dtype=torch.int64)
    with torch.no_grad():
        counts = {name: count_flops(partial(run, x)) for name, run in calls(model).items()}
    return {
        "slots": slots,
        "forward_gflops_a_segment": counts["forward"] / 1e9,
        "critical_share_of_flops": counts["advance"] / counts["forward"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--slots", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    found = []
    for slots in options.slots:
        model = build(options.width, slots)
        check(model)
        row = {"slots": slots, **share(model, options.rows, options.rounds), **token(model, options.rounds)}
        print(row)
        found.append(row)
    full = [full_size(slots) for slots in options.slots]
    print(full)
    write_json(
        options.out,
        {
            "benchmark": "memformer_cost",
            "shape": {**PAPER, "dim": options.width},
            "rows": found,
            "at_width_512": full,
            "provenance": provenance(0, "cpu"),
        },
    )


if __name__ == "__main__":
    main()
