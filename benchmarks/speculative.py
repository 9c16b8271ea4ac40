"""Speculative decoding beside plain decoding: tokens a second, acceptance, and whether the tokens are the same.

    python benchmarks/speculative.py --text FOLDER [--rounds 5] [--length 192] [--models DIR] [--out FILE]

Two models of bytes are trained on the text, about five minutes of a core together: a Transformer of four layers with a
window and a gated cache per stream, which has no fused step, and a linear Transformer of two layers, which has one and
drafts. `--models` keeps them. The last tenth of the text is held out and gives the prompts. A round decodes every
prompt in every way, in an order that rotates; times are CPU seconds of the process (`--wall`: seconds), medians of the
rounds. Greedy tokens must be those of plain decoding, or the benchmark fails. Last, the small model with look-up: a
model whose step is fused.

Then, without training, the price of a call: the time of reading k tokens from a state, divided by that of a plain step
(the fused one where there is one). So many tokens per call are needed before speculation pays.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import mnemos
from mnemos.generate.decoder_step import pack
from mnemos.lab.run.provenance import provenance
from mnemos.lab.tasks.files import read_bytes
from mnemos.lab.tasks.text_files import find_text

ROWS, SEGMENT, PROMPT = 8, 256, 64  # prompt and generated tokens are no longer than the rows of training
TARGET: dict[str, Any] = {"vocab_size": 256, "dim": 128, "layers": 4, "num_heads": 4, "mlp": 512, "max_length": 1024}
DRAFT = TARGET | {"layers": 2}
LARGE = TARGET | {"dim": 512, "layers": 8, "num_heads": 8, "mlp": 2048}
FORGETS: dict[str, Any] = {"vocab_size": 256, "dim": 128, "layers": 4, "num_heads": 4, "mlp": 352}
STEPS = (900, 1000)  # updates of the target and of the draft
SEGMENTED: dict[str, Any] = {"vocab_size": 256, "dim": 128, "layers": 4, "num_heads": 4, "mlp": 512, "segment": 64}
SEGMENTED |= {"norm": "pre", "activation": "gelu"}
WAYS = ("plain", "small model", "look-up")


def _transformer(**fields: Any) -> mnemos.Transformer:
    return mnemos.TransformerConfig.classic(**fields).build()


def build(name: str) -> torch.nn.Module:
    """A model with new weights."""
    torch.manual_seed(0)
    cache = mnemos.GRC(length=16, block=32, scope="stream")
    window = mnemos.SoftmaxConfig(window=64)
    return {
        "target": lambda: _transformer(**TARGET, attention=window, cache=cache),
        "gated delta, 128 x 4": lambda: mnemos.Transformer(**FORGETS, attention="gated-delta"),
        "draft": lambda: _transformer(**DRAFT, attention=mnemos.LinearConfig()),
        "linear, 512 x 8": lambda: _transformer(**LARGE, attention=mnemos.LinearConfig()),
        "softmax, 512 x 8": lambda: _transformer(**LARGE),
        "linear, 128 x 4": lambda: _transformer(**TARGET, attention=mnemos.LinearConfig()),
        "gated cache, 128 x 4": lambda: _transformer(**TARGET, attention=window, cache=cache),
        "Memformer, 128 x 4": lambda: mnemos.Memformer(
            vocab_size=256, dim=128, encoder_layers=2, decoder_layers=2, segment=64
        ),
        "RMT, 128 x 4": lambda: mnemos.RMT(**SEGMENTED),
        "ARMT, 128 x 4": lambda: mnemos.ARMT(**SEGMENTED),
    }[name]()


def trained(name: str, text: Tensor, folder: Path | None, steps: int) -> torch.nn.Module:
    """A model after `steps` updates on rows of the text, in eval mode; read from the folder if it is there."""
    if folder is not None and (folder / name).is_dir():
        return mnemos.load(folder / name).eval()
    model = build(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    generator, start, loss = torch.Generator().manual_seed(0), time.process_time(), torch.zeros(())
    for i in range(steps):
        places = torch.randint(len(text) - SEGMENT - 1, (ROWS,), generator=generator)
        batch = torch.stack([text[place : place + SEGMENT + 1] for place in places.tolist()])
        logits, _ = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if i % 50 == 0 or i == steps - 1:
            print(f"{name}: step {i}, {loss.item():.3f} nats per byte, {time.process_time() - start:.0f} s", flush=True)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        mnemos.save(model, folder / name)
    return model.eval()


def way(name: str, models: dict[str, torch.nn.Module], prompt: Tensor, options: dict[str, Any]) -> Callable[[], Any]:
    """A function that decodes after the prompt: (tokens, statistics or None)."""
    target, small = mnemos.Stream(models["target"]).prefill(prompt), mnemos.Stream(models["draft"]).prefill(prompt)
    draft = {"plain": None, "small model": small, "look-up": mnemos.Lookup(prompt)}[name]
    settings = {name: options[name] for name in ("length", "temperature")}

    def run() -> tuple[Tensor, Any]:
        generator = torch.Generator().manual_seed(0)
        if draft is None:
            return target.generate(**settings, generator=generator)[0], None
        found = mnemos.speculate(target, draft, drafted=options["drafted"], **settings, generator=generator)
        return found.tokens, found.statistics

    return run


def compared(models: dict[str, torch.nn.Module], prompts: list[Tensor], options: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second of every way over all prompts, by round. A model that is its own draft has no small one."""
    ways = WAYS if models["target"] is not models["draft"] else ("plain", "look-up")
    clock = time.perf_counter if options["wall"] else time.process_time
    runs = {name: [way(name, models, prompt, options) for prompt in prompts] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    outputs: dict[str, list[Any]] = {}
    for name in ways:  # not timed
        outputs[name] = [run() for run in runs[name]]
    same = all(
        torch.equal(tokens, plain)
        for name in ways
        for (tokens, _), (plain, _) in zip(outputs[name], outputs["plain"], strict=True)
    )
    if options["temperature"] == 0 and not same:
        raise SystemExit("greedy tokens differ from plain decoding")
    for i in range(options["rounds"]):
        for name in ways[i % len(ways) :] + ways[: i % len(ways)]:
            start = clock()
            for run in runs[name]:
                run()
            seconds[name].append(clock() - start)
    count = len(prompts) * options["length"]
    fused = mnemos.fused_step(models["target"]).fused
    row: dict[str, Any] = {"fused": fused, "temperature": options["temperature"], "same tokens as plain": same}
    for name in ways:
        found = [about for _, about in outputs[name] if about is not None]
        row[name] = {"tokens per second": count / statistics.median(seconds[name])}
        row[name]["of plain"] = statistics.median(a / b for a, b in zip(seconds["plain"], seconds[name], strict=True))
        if found:
            row[name]["acceptance"] = sum(x.accepted for x in found) / max(1, sum(x.drafted for x in found))
            row[name]["tokens per call"] = count / sum(x.calls for x in found)
        print(
            f"{'fused step, ' * fused}temperature {row['temperature']:g}  {name:12}",
            *(f"{k} {v:.2f}" for k, v in row[name].items()),
            flush=True,
        )
    return row


def price(name: str, rounds: int, wall: bool) -> dict[str, Any]:
    """The time of calls of k tokens, in steps of the model."""
    model, clock = build(name).eval(), time.perf_counter if wall else time.process_time
    step, whole = mnemos.fused_step(model), pack(model)
    x = torch.randint(256, (1, 300), generator=torch.Generator().manual_seed(0))
    _, state = model(x)
    calls: dict[str, Callable[[], Any]] = {"step": lambda: step(x[:, :1], state)}
    calls |= {str(k): lambda k=k: whole(x[:, :k], state) for k in (3, 5, 9)}
    times: dict[str, list[float]] = {key: [] for key in calls}
    for i in range(rounds + 1):
        for key, call in calls.items():
            start = clock()
            for _ in range(10):
                call()
            if i:
                times[key].append((clock() - start) / 10)
    found = {key: statistics.median(a / b for a, b in zip(times[key], times["step"], strict=True)) for key in calls}
    row = {"model": name, "fused": step.fused, "ms per step": 1e3 * statistics.median(times["step"])}
    row["steps per call"] = {key: found[key] for key in calls if key != "step"}
    print(f"{name:22} {row['ms per step']:6.2f} ms {'(fused)' if step.fused else '':8}", end="")
    print(*(f"  {key} tokens {value:.2f} steps" for key, value in row["steps per call"].items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a file of text, or a folder of them")
    parser.add_argument("--models", type=Path, help="the folder in which the trained models are kept")
    parser.add_argument("--steps", type=int, nargs=2, default=STEPS, help="updates of the two models")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--length", type=int, default=SEGMENT - PROMPT)
    parser.add_argument("--drafted", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--out", type=Path, help="results/speculative.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    content = b"".join(map(read_bytes, sorted(find_text(str(options.text)).read)))
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    kept = len(text) * 9 // 10
    steps = dict(zip(("target", "draft"), options.steps, strict=True))
    models = {name: trained(name, text[:kept], options.models, steps) for name, steps in steps.items()}
    places = torch.linspace(kept, len(text) - SEGMENT, options.prompts).long().tolist()
    prompts = [text[None, place : place + PROMPT] for place in places]
    with torch.no_grad():
        found: dict[str, Any] = {"steps": steps, "prompts": options.prompts, "length": options.length}
        found |= {"drafted": options.drafted, "clock": "wall" if options.wall else "CPU", "threads": options.threads}
        found["decoding"] = [
            compared(pair, prompts, vars(options) | {"temperature": temperature})
            for pair in (models, {"target": models["draft"], "draft": models["draft"]})
            for temperature in (0.0, 1.0)
        ]
        names = ("gated cache, 128 x 4", "Memformer, 128 x 4", "RMT, 128 x 4", "ARMT, 128 x 4", "linear, 128 x 4")
        names += ("linear, 512 x 8", "softmax, 512 x 8")
        found["price"] = [price(name, options.rounds, options.wall) for name in names]
    if options.out:
        options.out.write_text(json.dumps({**found, "provenance": provenance(0, "cpu")}, indent=2) + "\n")


if __name__ == "__main__":
    main()
