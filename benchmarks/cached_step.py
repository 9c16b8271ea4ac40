"""The time of a training step with a gated cache, relative to the same step without it.

    python benchmarks/cached_step.py [--models demo vit_s bert_base] [--pairs 9] [--threads 2] [--out FILE.json]

demo: an update of the recipes short-listops, -cached and -cached-unwritten by the training loop itself, with its data,
gradient clipping and optimiser. vit_s (8 images of 224²) and bert_base (4 × 128 tokens): forward, backward and AdamW of
a model of timm and transformers before and after `mnemos.cache`. Each variant is measured once per pair, right after
the others and in an order that rotates; the ratio is the median over the pairs, with its smallest and largest value.
"composed": the same with the kernels off. clock: "wall", or "cpu", the CPU time of this thread, which other programs
disturb less and which is meaningful with one thread. Events: what torch.profiler counts in one step.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from command import beside, command, write
from torch import nn

import mnemos
from mnemos import GRC, libraries, registry
from mnemos.lab.measure.timing import race
from mnemos.lab.run import devices
from mnemos.lab.run.checks import complete
from mnemos.lab.run.learner import Learner
from mnemos.lab.run.loop import update
from mnemos.ops.gated_cache import native

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
LEAST = 0.2  # seconds per measurement
Step = Callable[[], object]


def demo(threads: int) -> dict[str, Step]:
    """Updates of the training loop, by variant."""
    found = {}
    for name, ending in {"plain": "", "cached": "-cached", "unwritten": "-cached-unwritten"}.items():
        made = registry.load("recipe", f"short-listops{ending}")()
        made = replace(made, train=replace(made.train, threads=threads))
        fabric = devices.connect(made.train)
        task = made.data.build()
        found[name] = partial(update, Learner(fabric, complete(made, task), task))
    return found


def host(model: nn.Module, x: torch.Tensor, length: Any) -> dict[str, Step]:
    """Training steps of a model of another library, by variant."""

    def step_of(model: nn.Module) -> Step:
        model.train()
        optimiser = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
        target = torch.zeros(len(x), dtype=torch.int64)

        def step() -> None:
            y = model(x)
            nn.functional.cross_entropy(y if isinstance(y, torch.Tensor) else y.logits, target).backward()
            optimiser.step()
            optimiser.zero_grad()

        return step

    cached = copy.deepcopy(model)
    mnemos.cache(cached, GRC(length=length))
    return {"plain": step_of(model), "cached": step_of(cached)}


def vit_s(_: int) -> dict[str, Step]:
    """ViT-S of timm."""
    model = libraries.timm().create_model("vit_small_patch16_224")
    return host(model, torch.randn(8, 3, 224, 224), 197)


def bert_base(_: int) -> dict[str, Step]:
    """BERT-base of transformers."""
    found = libraries.transformers()
    return host(found.BertForSequenceClassification(found.BertConfig()), torch.randint(1000, (4, 128)), "auto")


MODELS = {"demo": demo, "vit_s": vit_s, "bert_base": bert_base}


def composed(step: Step) -> Step:
    """The step with the gated cache's kernels off."""

    def run() -> None:
        takes = native.takes
        native.takes = lambda *_: False
        try:
            step()
        finally:
            native.takes = takes

    return run


def events(step: Step) -> int:
    """What torch.profiler counts in one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return len(profile.events())


def assess(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The steps of a model's variants in rotation."""
    torch.manual_seed(0)
    steps = MODELS[name](options.threads)
    steps["composed"] = composed(steps["cached"])
    torch.set_num_threads(options.threads)
    for step in steps.values():
        step(), step()
    rows = beside(race(steps, options.pairs, CLOCKS[options.clock], LEAST), "plain")
    for variant, row in rows.items():
        row["events"] = events(steps[variant])
        low, high = row["range"]
        line = f"{name:10} {variant:10} {1e3 * row['seconds']:9.2f} ms  x{row['ratio']:.3f}"
        print(f"{line} ({low:.3f} to {high:.3f})  {row['events']} events", flush=True)
    return rows


def main() -> None:
    parser = command(
        __doc__, choices={"models": MODELS, "clock": CLOCKS}, models=list(MODELS), pairs=9, threads=2, clock="wall"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = {name: assess(name, options) for name in options.models}
    settings = {"pairs": options.pairs, "threads": options.threads, "clock": options.clock}
    write(options.out, {**settings, "models": rows})


if __name__ == "__main__":
    main()
