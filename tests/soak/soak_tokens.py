"""A million tokens through every registered model that reads a stream: flat memory, flat time, a state as declared."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from contract_cases import ATTENTIONS, MODELS, declared, has
from torch import Tensor, nn
from usage import settle, state_bytes, tenths, usage

import mnemos
from mnemos import GRC, registry
from mnemos.types import HeadAttention, State

SIZES = {"vocab_size": 50, "dim": 16, "layers": 2, "num_heads": 2, "mlp": 32, "segment": 16}
SIZES |= {"encoder_layers": 1, "decoder_layers": 2}
TOKENS, GROWING = 1_000_000, 10_000  # of a state that grows, each token costs the more the more came before it
PARTS, PIECE, SINGLE = {"constant": 100, "growing": 20}, 1000, 20  # of each part, the last tokens are drawn one by one
MEMORY, SLOWER = 4 * 2**20, 1.5
CACHE = GRC(length=4, scope="stream", block=512)  # updated every 512 tokens: the default, 64, costs eight times more


@dataclass(frozen=True)
class Case:
    """A configuration by its name."""

    name: str
    config: Any

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.config.build().eval()


def cases() -> Iterator[Case]:
    """The Transformer with each causal attention, with and without a cache per stream, and every other model."""
    for name, attention in ATTENTIONS.items():
        if True not in attention.causal_modes:
            continue
        caches = (None, CACHE) if isinstance(declared(name, "", True), HeadAttention) else (None,)
        for cache in caches:
            sizes = {k: v for k, v in SIZES.items() if has(mnemos.TransformerConfig, k)}
            config = mnemos.TransformerConfig(**sizes, attention=attention, cache=cache)
            yield Case(f"transformer, {name}{', cached' if cache else ''}", config)
    for case in MODELS:
        if not case.predicts or case.name == "transformer" or (case.cache and case.cache.scope != "stream"):
            continue
        kind = registry.load("model", case.name)
        config = kind(**{k: v for k, v in SIZES.items() if has(kind, k)})
        if case.cache:
            config = replace(config, cache=CACHE)
        yield Case(f"{case.name}{', cached' if case.cache else ''}", config)


def run(share: float, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Stream the tokens through every case; what was measured, and what failed."""
    torch.set_num_threads(1)
    rows, failed = {}, []
    for case in cases():
        try:
            rows[case.name], problems = stream(case, share, say)
        except Exception as error:  # the others go on
            problems = [f"{type(error).__name__}: {error}"]
        failed += [f"{case.name}: {problem}" for problem in problems]
    kinds = Counter(row["state"] for row in rows.values())
    return {"models": len(rows), **kinds, "streams": rows, "failed": failed}


def stream(case: Case, share: float, say: Callable[[str], None] = lambda _: None) -> tuple[dict[str, Any], list[str]]:
    """One model: its numbers, and a line for each that is not as declared."""
    model = case.build()
    grows = model.state_kind == "growing"
    parts = PARTS[model.state_kind]
    part = max(2 * SINGLE, int((GROWING if grows else TOKENS) * share) // parts)
    generator = torch.Generator().manual_seed(1)
    now, cpu, rss, sizes = begin(model, generator), [], [], []
    for number in range(parts):
        tokens = torch.randint(50, (1, part), generator=generator)
        began = time.process_time()
        now = now.prefill(tokens[:, SINGLE:], chunk=PIECE)
        _, now = now.generate(SINGLE, generator=generator)
        cpu.append((time.process_time() - began) / part)
        settle()
        rss.append(usage().rss)
        sizes.append(state_bytes(now.state))
        say(f"{case.name}: {part * (number + 1):,} tokens, {rss[-1] / 2**20:.0f} MiB, a state of {sizes[-1]:,} bytes")
    finite = all(leaf.isfinite().all() for leaf in (now.predict(), *floats(now.state)))
    (first_cpu, last_cpu), (first_rss, last_rss) = tenths(cpu), tenths(rss)
    row = {
        "state": model.state_kind,
        "tokens": part * parts,
        "microseconds_per_token": [round(1e6 * x, 2) for x in (first_cpu, last_cpu)],
        "rss_mib": [round(x / 2**20, 2) for x in (first_rss, last_rss)],
        "state_bytes": [sizes[0], max(sizes)],
    }
    return row, judge(row, sizes, finite)


def begin(model: nn.Module, generator: torch.Generator) -> mnemos.Stream:
    """A stream after one token, of a translator after a sentence of its source."""
    first = torch.randint(50, (1, 1), generator=generator)
    if model.config.inputs == "pairs":
        return mnemos.Stream(model, state=model.encode(torch.randint(50, (1, 9), generator=generator)), last=first)
    return mnemos.Stream(model).prefill(first)


def floats(state: State) -> list[Tensor]:
    return [leaf for leaf in mnemos.types.leaves(state) if leaf.is_floating_point()]


def judge(row: dict[str, Any], sizes: list[int], finite: bool) -> list[str]:
    """What is not as the model declares; bytes of a state that grows may follow its tokens alone."""
    problems = [] if finite else ["numbers that are not finite"]
    grown = 2**20 * (row["rss_mib"][1] - row["rss_mib"][0])
    if row["state"] == "growing":
        half, end = sizes[len(sizes) // 2 - 1], sizes[-1]
        if not 1.6 < end / half < 2.4:
            problems.append(f"a state of {half:,} bytes at half of its tokens and {end:,} at the end")
        grown -= 2 * (sizes[-1] - sizes[0])  # and a copy
    else:
        middle = len(sizes) // 2  # a state may hold a segment that is not whole
        if max(sizes[middle:]) > max(sizes[:middle]):
            problems.append(
                f"a state of up to {max(sizes[:middle]):,} bytes at first and {max(sizes[middle:]):,} later"
            )
        first, last = row["microseconds_per_token"]
        if last > SLOWER * first:
            problems.append(f"a token took {first} µs of the processor at first and {last} later")
    if grown > MEMORY:
        problems.append(f"the memory grew by {grown / 2**20:.1f} MiB")
    return problems
