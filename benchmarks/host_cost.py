"""The cost of a gated cache in models of other libraries: each host is compared with its cached variant in one process.

    python benchmarks/host_cost.py [--hosts pvt_tiny vit_s ...] [--rounds 7] [--quick] [--out results/host_cost.json]

First, it checks that a cached variant with closed gates computes the same as its host, and that the operations counted
by PyTorch are those of the host plus those of the formula (mnemos/ops/gated_cache/cost.py).

It then times, interleaved in an order that rotates, a training step (forward, backward, AdamW) and a forward pass in
evaluation mode without gradients: of the host, of its variants with preset="paper" (whose cache is frozen in
evaluation) by channels ("paper") and by heads ("heads"), and of its variant with the default preset. Meanwhile the
process keeps freed memory, as with jemalloc: new pages from the kernel cost more than the arithmetic, and would affect
models at random.

Peak memory is the growth of the resident memory of a separate process over three training steps. The process is forked
before anything else runs and uses the default allocator. It is also measured at four times the batch size, because a
cache's parameters cost the same at every batch size, while the tensors kept for the backward pass grow with it.
"""

import copy
import multiprocessing
import os
import resource
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from command import command, write
from torch import Tensor, nn

import mnemos
from mnemos import GRC, libraries
from mnemos.lab.measure.flops import count_flops
from mnemos.lab.measure.timing import race, ratio
from mnemos.lab.run.kept_memory import keep_freed_memory
from mnemos.memory.gated_cache import caches
from mnemos.ops.gated_cache import cost

SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {"preset": "paper"},
    "heads": {"preset": "paper", "mix": "heads"},
    "mnemos": {"preset": "mnemos"},  # the library's default
}
PRESETS = tuple(SETTINGS)
MODES = ("training", "inference")


@dataclass(frozen=True)
class HostModel:
    """A host model, the shape of its inputs, and the length of its cache."""

    name: str
    build: Callable[[], nn.Module]
    batch: int
    length: Any = "auto"
    tokens: int = 0  # per row of text; 0 means images of 224²

    @property
    def fed(self) -> str:
        return f"{self.batch} x {self.tokens} tokens" if self.tokens else f"{self.batch} x 3 x 224 x 224"

    def inputs(self, times: int = 1) -> Tensor:
        torch.manual_seed(1)
        if self.tokens:
            return torch.randint(1000, (times * self.batch, self.tokens))
        return torch.randn(times * self.batch, 3, 224, 224)

    def cached(self, host: nn.Module, preset: str) -> tuple[nn.Module, Any]:
        """A copy of the host with caches, and the report of `mnemos.cache`."""
        model = copy.deepcopy(host)
        return model, mnemos.cache(model, GRC(length=self.length, **SETTINGS[preset]))


def _pvt_tiny() -> nn.Module:
    found = libraries.transformers()
    return found.PvtForImageClassification(found.PvtConfig(num_labels=1000))


def _bert() -> nn.Module:
    found = libraries.transformers()
    return found.BertForSequenceClassification(found.BertConfig())


def _timm(name: str) -> Callable[[], nn.Module]:
    return lambda: libraries.timm().create_model(name)


HOSTS = {
    host.name: host
    for host in (
        HostModel("pvt_tiny", _pvt_tiny, 8),
        HostModel("vit_s", _timm("vit_small_patch16_224"), 8, length=197),
        HostModel("swin_t", _timm("swin_tiny_patch4_window7_224"), 4),
        HostModel("pvt_v2_b2", _timm("pvt_v2_b2"), 4),
        HostModel("bert_base", _bert, 4, tokens=128),
    )
}


def logits(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return y if isinstance(y, Tensor) else y.logits


def work(model: nn.Module, x: Tensor, mode: str) -> Callable[[], None]:
    """A function that runs one training step or one forward pass in evaluation. It sets the model's mode once, here."""
    if mode == "inference":
        model.eval()  # set once, because eval() discards the frozen cache's keys and values

        def infer() -> None:
            with torch.no_grad():
                logits(model, x)

        return infer
    model.train()
    y = torch.zeros(x.shape[0], dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)

    def step() -> None:
        nn.functional.cross_entropy(logits(model, x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def check(host: nn.Module, cached: nn.Module, x: Tensor) -> float:
    """The largest difference in a logit between a host and its cached variant with closed gates, in both modes."""
    closed = copy.deepcopy(cached)
    worst = 0.0
    with torch.no_grad():
        for cache in caches(closed):
            cache.mix.fill_(-torch.inf)
        for training in (False, True):
            outputs = []
            for model in (host, closed):
                torch.manual_seed(2)
                outputs.append(logits(model.train(training), x))
            torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
            worst = max(worst, float((outputs[0] - outputs[1]).abs().max()))
    return worst


def shape_of(one: Any, x: Tensor) -> cost.Shape:
    """The sizes of a cached attention; for text, the number of tokens is that of the input."""
    return one.shape._replace(tokens=one.input.tokens or x.shape[1])


def counted(model: nn.Module, x: Tensor, what: str) -> int:
    """FLOPs of a forward pass in training ("training") or evaluation ("inference"), or with its backward ("step")."""
    model.train(what != "inference")
    if what == "step":
        found = count_flops(lambda: logits(model, x).sum().backward())
        model.zero_grad()
        return found
    with torch.no_grad():
        logits(model, x)  # a frozen cache's keys and values are projected once
        return count_flops(lambda: logits(model, x))


def flops(host: nn.Module, cached: nn.Module, report: Any, x: Tensor) -> dict[str, Any]:
    """Count the FLOPs of both models. Their difference must equal the formula."""
    added = {"training": 0, "step": 0, "inference": 0}
    for one in report.swapped:
        shape, grc = shape_of(one, x), one.grc
        added["training"] += 2 * cost.training_macs(shape, grc, len(x))
        added["step"] += 2 * cost.training_macs(shape, grc, len(x)) + 2 * cost.backward_macs(shape, grc, len(x))
        added["inference"] += 2 * cost.inference_macs(shape, grc, len(x))
    found: dict[str, Any] = {}
    for name in added:
        counts = [counted(model, x, name) for model in (host, cached)]
        found[name] = {
            "host": counts[0],
            "cached": counts[1],
            "added by the formula": added[name],
            "ratio": counts[1] / counts[0],
        }
        assert counts[1] - counts[0] == added[name], (name, counts, added[name])
    return found


def peak(name: str, times: int, preset: str | None, threads: int, answer: Any) -> None:
    """Run in a separate process: put the growth of its resident memory over three steps, in bytes, in `answer`."""
    torch.set_num_threads(threads)
    host = HOSTS[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = host.build()
    if preset:
        mnemos.cache(model, GRC(length=host.length, **SETTINGS[preset]))
    step = work(model, host.inputs(times), "training")
    for _ in range(3):
        step()
    answer.put(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def peaks(name: str, times: int, threads: int, repeats: int) -> dict[str, int]:
    """The smallest of a few measurements, because disturbances only add memory."""
    context = multiprocessing.get_context("fork")  # safe, because this process has not started threads yet
    found: dict[str, list[int]] = {}
    for _ in range(repeats):
        for preset in (None, *PRESETS):
            answer = context.Queue()
            child = context.Process(target=peak, args=(name, times, preset, threads, answer))
            child.start()
            found.setdefault(preset or "host", []).append(answer.get(timeout=300))
            child.join()
    return {preset: min(each) for preset, each in found.items()}


def assess(host: HostModel, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x, plain = host.inputs(), host.build()
    models = {"host": plain}
    row: dict[str, Any] = {"host": host.name, "fed": host.fed, "presets": {}}
    for preset in PRESETS:
        model, report = host.cached(plain, preset)
        models[preset] = model
        row["presets"][preset] = {
            "closed gate differs by": check(plain, model, x),
            "parameters": {"host": sum(p.numel() for p in plain.parameters()), "added": report.parameters},
            "slots": sorted({one.length for one in report.swapped}),
            "flops": flops(plain, model, report, x),
            # A lower bound on memory: tensors for the backward pass, and 16 bytes per parameter.
            "kept": sum(cost.kept_bytes(shape_of(one, x), one.grc, len(x)) for one in report.swapped)
            + 16 * report.parameters,
        }
    for mode in MODES:
        runs = {name: work(model, x, mode) for name, model in models.items()}
        for run in runs.values():
            run()
        times = race(runs, rounds)
        row[mode] = {"host": {"seconds": statistics.median(times["host"])}}
        for preset in PRESETS:
            found = ratio(times, preset, "host")
            row[mode][preset] = {
                "measured": found.median,
                "quartiles": [found.low, found.high],
                "flops": row["presets"][preset]["flops"]["step" if mode == "training" else mode]["ratio"],
                "seconds": statistics.median(times[preset]),
            }
    return row


def show(row: dict[str, Any]) -> None:
    base = row["training"]["host"]["seconds"], row["inference"]["host"]["seconds"], row["memory"]["host"] / 2**20
    print(f"{row['host']} ({row['fed']}): step {base[0]:.3f} s, forward {base[1]:.3f} s, peak {base[2]:.0f} MiB")
    for preset in PRESETS:
        counted = row["presets"][preset]["flops"]["training"]["ratio"]
        kept = 1 + row["presets"][preset]["kept"] / row["memory"]["host"]
        memory, larger = (row[name][preset] / row[name]["host"] for name in ("memory", "memory, 4 x batch"))
        line = f"  {preset:7} FLOPs x{counted:.3f}  memory x{memory:.3f}"
        line += f" (by formula at least {kept:.3f}; 4 x batch: {larger:.3f})"
        for mode in MODES:
            one = row[mode][preset]
            line += f"  {mode} x{one['measured']:.3f} ({one['quartiles'][0]:.3f} to {one['quartiles'][1]:.3f};"
            line += f" FLOPs {one['flops']:.3f})"
        print(line, flush=True)


def main() -> None:
    parser = command(
        __doc__, choices={"hosts": HOSTS}, hosts=list(HOSTS), rounds=7, threads=min(2, os.cpu_count() or 1)
    )
    parser.add_argument("--quick", action="store_true", help="one round, memory once: only a rough check")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    libraries.timm(), libraries.transformers()
    torch.set_num_threads(1)  # until the child processes have been forked
    memory = {
        name: {
            "memory": peaks(name, 1, options.threads, 1 if options.quick else 2),
            "memory, 4 x batch": peaks(name, 4, options.threads, 1),
        }
        for name in options.hosts
    }
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    rows = []
    for name in options.hosts:
        rows.append({**assess(HOSTS[name], rounds), **memory[name]})
        show(rows[-1])
    write(options.out, {"rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
