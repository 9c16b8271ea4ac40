"""Memory and speed of replay compared with back-propagation through time and torch.utils.checkpoint.

    python benchmarks/replay.py [--rounds 15] [--out results/replay.json]
    python benchmarks/replay.py --million [--out results/replay_million.json]     a million tokens in one rollout
    python benchmarks/replay.py --only steps [--out results/replay_steps.json]    200 steps of one token: a GRU cell

The model is a small recurrent Transformer in the shape of Memformer's language model: an encoder that reads and
replaces K slots of memory (the critical path), and a decoder four times as deep that reads the encoder's output for the
segment. First, the gradients of all ways must agree. A round times every way once, in an order that rotates.

Upper limits of the speed relative to back-propagation through time over T segments, if a forward pass costs 1 and a
backward pass 2: 3T/(4T − 1) without `advance`, and 3T/(3T + f(T − 1)) with an `advance` that costs a share f of a
forward pass. The same limits are also computed from the forward, backward and advance times measured here.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from command import command, in_turns, quartiles, write
from torch import Tensor, nn

import mnemos
from mnemos.attention import LinearConfig
from mnemos.lab.measure.gradients import WAYS, check_ways, most_saved
from mnemos.lab.measure.peak import peak_of
from mnemos.lab.measure.timing import seconds_of

VOCABULARY = 64


class Recurrent(nn.Module):
    def __init__(self, width: int, encoders: int, decoders: int, slots: int) -> None:
        super().__init__()

        def layers(n: int) -> nn.ModuleList:
            return nn.ModuleList(
                nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
                for _ in range(n)
            )

        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.encoder, self.decoder = layers(encoders), layers(decoders)
        self.start = nn.Parameter(torch.randn(slots, width))
        self.norm = nn.LayerNorm(width)

    def encoded(self, x: Tensor, memory: Tensor | None) -> Tensor:
        memory = self.start.expand(len(x), -1, -1) if memory is None else memory
        y = torch.cat([memory, self.embedding(x)], 1)
        for layer in self.encoder:
            y = layer(y)
        return self.norm(y)

    def advance(self, x: Tensor, memory: Tensor | None) -> Tensor:
        return self.encoded(x, memory)[:, : len(self.start)]

    def forward(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        y = self.encoded(x, memory)
        memory, y = y[:, : len(self.start)], y[:, len(self.start) :]
        for layer in self.decoder:
            y = layer(y)
        return nn.functional.cross_entropy(self.head(y).flatten(0, 1), x.flatten()), memory


class Segments:
    """A sequence of segments that are generated on access, so that inputs take no memory."""

    def __init__(self, count: int, batch: int, tokens: int) -> None:
        self.count, self.shape = count, (batch, tokens)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, t: int) -> Tensor:
        if not 0 <= t < self.count:
            raise IndexError(t)
        return torch.randint(VOCABULARY, self.shape, generator=torch.Generator().manual_seed(t))


def truncated(model: Recurrent, pieces: Segments) -> None:
    """Two passes that keep nothing between segments: the memory that any loop of this form needs."""
    for learns in (False, True):
        state = None
        for x in pieces:
            with torch.set_grad_enabled(learns):
                loss, state = model(x, state)
            if learns:
                loss.backward()
            state = state.detach()


def memory(
    model: Recurrent, batch: int, tokens: int, counts: list[int], longest: int, rounds: int
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, way in {"nothing kept": truncated, **WAYS}.items():
        for count in counts:
            if name in ("through time", "torch.utils.checkpoint") and count > longest:
                continue
            pieces = Segments(count, batch, tokens)
            run = functools.partial(way, model, pieces)
            if not rows:
                run()  # gradients, and memory that is allocated only once
            # checkpointing saves tensors through its own hooks
            saved = None if "checkpoint" in name else most_saved(run)
            peaks = sorted(peak_of(run) or 0 for _ in range(rounds))  # they differ by a few percent
            peak = statistics.median(peaks)
            kept = count if "sqrt" not in name else 2 * int(count**0.5 + 1)
            states = kept * batch * model.start.numel() * 4
            rows.append({"way": name, "segments": count, "saved": saved, "peak": peak, "peaks": peaks})
            rows[-1]["states"] = states if "replay" in name else 0
            print(f"{name:24} {count:4} segments: saved {(saved or 0) / 2**20:8.2f} MiB, peak "
                  f"{peak / 2**20:8.2f} MiB, stored states {rows[-1]['states'] / 2**20:6.2f} MiB",
                  flush=True)  # fmt: skip
    return rows


def speed(model: Recurrent, pieces: Segments, rounds: int) -> dict[str, Any]:
    x, state = pieces[0], model.advance(pieces[1], None).detach()

    def whole_forward() -> None:
        nonlocal loss
        loss = model(x, state)[0]

    loss = torch.zeros(())
    parts: dict[str, list[float]] = {"forward": [], "backward": [], "forward without gradient": [], "advance": []}

    def measure_parts() -> float:
        for _ in range(4):
            parts["forward"].append(seconds_of(whole_forward))
            parts["backward"].append(seconds_of(lambda: loss.backward()))
            with torch.no_grad():
                parts["forward without gradient"].append(seconds_of(lambda: model(x, state)))
                parts["advance"].append(seconds_of(lambda: model.advance(x, state)))
        return 0.0

    def seconds(name: str) -> float:
        found = seconds_of(lambda: WAYS[name](model, pieces))
        model.zero_grad()
        return found

    ways = {name: functools.partial(seconds, name) for name in WAYS}
    times = in_turns({"parts": measure_parts, **ways}, rounds)  # the first round warms up the allocator
    f, b, n, a = (statistics.median(parts[k]) for k in parts)
    steps, share = len(pieces), a / n
    first = {"replay": n, "replay, advance": a}
    limits = {
        "replay": (3 * steps / (4 * steps - 1), share),
        "replay, advance": (3 * steps / (3 * steps + share * (steps - 1)), share),
    }
    print(f"forward {1e3 * f:.2f} ms, without gradient {1e3 * n:.2f}, backward {1e3 * b:.2f}, advance {1e3 * a:.2f}: "
          f"f = {share:.3f}")  # fmt: skip
    medians = {k: 1e3 * statistics.median(v) for k, v in parts.items()}
    found: dict[str, Any] = {"steps": steps, "share": share, "ms": medians, "ways": []}
    for name in WAYS:
        row: dict[str, Any] = {"way": name, "seconds": statistics.median(times[name])}
        for peer in ("through time", "torch.utils.checkpoint"):
            row[f"speed of {peer}"] = quartiles(times, peer, name)
        if name in limits:
            measured = steps * (f + b) / (steps * (f + b) + (steps - 1) * first[name])
            row |= {"limit": limits[name][0], "limit from these parts": measured}
        found["ways"].append(row)
        own = row["speed of through time"]["median"]
        line = f"{name:24} {row['seconds']:.3f} s, speed {own:.3f} relative to through time, "
        line += f"{row['speed of torch.utils.checkpoint']['median']:.3f} to checkpoint"
        if name in limits:
            line += f"; limit {row['limit']:.3f} ({own / row['limit']:.3f} of it), "
            parts_limit = row["limit from these parts"]
            line += f"from measured parts {parts_limit:.3f} ({own / parts_limit:.3f} of it)"
        print(line, flush=True)
    return found


class Cell(nn.Module):
    """A recurrent model whose step is a token: a forward and a backward take a tenth of a millisecond."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, 1)

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        state = self.cell(x, state)
        return self.head(state).square().mean(), state


def small_steps(steps: int, batch: int, width: int, rounds: int) -> dict[str, Any]:
    """CPU time of this thread for one rollout: median of the ratios to back-propagation of the same round."""
    torch.manual_seed(0)
    model, pieces = Cell(width), torch.randn(steps, batch, width)
    ways: dict[str, Callable[[], Any]] = {
        name: functools.partial(WAYS[name], model, pieces)
        for name in ("through time", "torch.utils.checkpoint", "replay")
    }
    ways["replay, verify=False"] = lambda: mnemos.replay(model, pieces, verify=False)

    def seconds(run: Callable[[], Any]) -> float:
        start = time.thread_time()
        run()
        spent = time.thread_time() - start
        model.zero_grad()
        return spent

    times = in_turns({name: functools.partial(seconds, run) for name, run in ways.items()}, rounds)
    found: dict[str, Any] = {"steps": steps, "batch": batch, "width": width, "rounds": rounds, "ways": []}
    for name, own in times.items():
        ratios = quartiles(times, name, "through time")
        row = {"way": name, "ms per step": 1e3 * statistics.median(own) / steps, "ratio": ratios["median"]}
        row["quartiles"] = ratios["quartiles"]
        found["ways"].append(row)
        print(f"{name:24} {row['ms per step']:.3f} ms per step, {row['ratio']:.2f} times back-propagation", flush=True)
    return found


def million(tokens: int, segment: int, checkpoints: str, offload: bool) -> dict[str, Any]:
    """One rollout of a linear Transformer over `tokens` tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "dim": 128, "layers": 2, "num_heads": 4, "mlp": 512}
    model = mnemos.TransformerConfig.classic(**sizes, attention=LinearConfig(), position="none").build()

    def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits, state = model(x[:, :-1], state)
        return nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()), state

    def gradients(way: Callable[[Segments], Any]) -> list[Tensor]:
        way(Segments(12, 1, segment + 1))
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    def plain(pieces: Segments) -> None:
        total, state = torch.zeros(()), None
        for x in pieces:
            loss, state = step(x, state)
            total = total + loss / len(pieces)
        total.backward()

    def replayed(pieces: Segments) -> mnemos.State:
        return mnemos.replay(step, pieces, module=model, checkpoints=checkpoints, offload=offload)

    for a, b in zip(gradients(replayed), gradients(plain), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7
    pieces = Segments(-(-tokens // segment), 1, segment + 1)
    losses: list[Tensor] = []
    start = time.perf_counter()
    peak = peak_of(lambda: losses.append(replayed(pieces).loss))
    seconds = time.perf_counter() - start
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    total = len(pieces) * segment
    print(f"{total:,} tokens in {len(pieces)} segments, {checkpoints}: peak {(peak or 0) / 2**20:.1f} MiB in "
          f"addition to that before; weights {weights / 2**20:.1f} MiB")  # fmt: skip
    print(f"{seconds:.0f} s, {total / seconds:,.0f} tokens/s, loss {losses[0]:.4f}")
    return {"tokens": total, "segment": segment, "checkpoints": checkpoints, "offload": offload, "peak": peak,
            "weights": weights, "seconds": seconds, "loss": float(losses[0])}  # fmt: skip


def main() -> None:
    parser = command(__doc__, rounds=15, counts=[8, 64, 512], tokens=1_000_000, segment=1000, checkpoints="sqrt")
    parser.add_argument("--segments", type=int, default=16, help="segments of a timed rollout")
    parser.add_argument("--peaks", type=int, default=5, help="measurements per peak; their median is reported")
    parser.add_argument("--only", choices=["speed", "memory", "steps"], help="run only this part")
    parser.add_argument("--million", action="store_true")
    parser.add_argument("--offload", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    if options.million:
        result["million"] = million(options.tokens, options.segment, options.checkpoints, options.offload)
    else:
        torch.manual_seed(0)
        result["threads"] = 1
        if options.only in (None, "steps"):
            result["steps"] = small_steps(200, 8, 32, options.rounds)
        if options.only in (None, "speed"):
            shape, batch, tokens = {"width": 128, "encoders": 4, "decoders": 16, "slots": 16}, 4, 64
            model = Recurrent(**shape)
            check_ways(model, Segments(5, batch, tokens))
            result["speed"] = {"shape": {**shape, "batch": batch, "tokens": tokens}}
            result["speed"] |= speed(model, Segments(options.segments, batch, tokens), options.rounds)
        if options.only in (None, "memory"):
            shape, batch = {"width": 64, "encoders": 1, "decoders": 6, "slots": 4}, 8
            model = Recurrent(**shape)
            check_ways(model, Segments(3, batch, 64))
            result["memory"] = {"shape": {**shape, "batch": batch, "tokens": 64}}
            result["memory"]["ways"] = memory(model, batch, 64, options.counts, 32, options.peaks)
    write(options.out, result)


if __name__ == "__main__":
    main()
