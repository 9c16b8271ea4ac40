"""A memory for a decoder that is already trained: what does fine-tuning it with a memory give beyond its window?

    python benchmarks/pretrained_memory.py --out FOLDER [--seeds 3] [--result results/pretrained_memory.json]

A small Mistral with a sliding window of 32 tokens is trained to predict the next word of the reference of the Python
language (`told`'s training text). It stands for a checkpoint of `from_pretrained`. Then it is fine-tuned on the task of
`make demo`: a fact is told in the text and asked for 32 to 512 words later. Each way of `WAYS` begins with the same
decoder, reads the same rows in the same order, and has the same number of updates and the same learning rate, which is
constant and was not swept. Test accuracy at each distance. The runs are in FOLDER, and the same command continues an
interrupted one.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mnemos
from mnemos.atomic import write_text
from mnemos.lab.compare.baselines import Role
from mnemos.lab.compare.comparison import summarise
from mnemos.lab.run.recipe import OptimConfig, TrainConfig
from mnemos.lab.tasks.fact_recall import ToldConfig, ToldTask

mnemos.libraries.transformers()
from transformers import MistralConfig, MistralForCausalLM  # noqa: E402

WINDOW, SLOTS, TOKENS = 32, 8, 8
PRETRAINING, ROWS, LENGTH = 400, 16, 128  # updates, rows and words per row of the decoder's own training
STEPS, RATE = 250, 3e-3  # of fine-tuning: as in `demo`, which lowers the rate by a cosine
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def decoder(vocabulary: int) -> MistralForCausalLM:
    """The decoder with new weights."""
    torch.manual_seed(0)
    return MistralForCausalLM(
        MistralConfig(vocab_size=vocabulary, num_key_value_heads=4, sliding_window=WINDOW, **SIZES)
    )


def pretrain(model: MistralForCausalLM, text: Tensor) -> float:
    """Train the decoder on next words, and return the mean loss of the last 50 updates in nats per word."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(PRETRAINING):
        begin = torch.randint(len(text) - LENGTH, (ROWS, 1), generator=generator)
        rows = text[begin + torch.arange(LENGTH + 1)]
        logits = model(rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return statistics.fmean(losses[-50:])


def cached(model: MistralForCausalLM, frozen: bool = False, **settings: Any) -> nn.Module:
    """A gated cache per stream in every attention. frozen: the decoder keeps its weights, and the caches train."""
    model.requires_grad_(not frozen)
    mnemos.cache(model, mnemos.GRC(scope="stream", length=SLOTS, block=WINDOW, **settings))
    return mnemos.functional(model)


def remembering(model: MistralForCausalLM) -> nn.Module:
    """Memory tokens around segments that fill the window with them."""
    return mnemos.hosts.Segmented(mnemos.remember(model, tokens=TOKENS), segment=WINDOW - 2 * TOKENS)


WAYS: dict[str, Callable[[MistralForCausalLM], nn.Module]] = {
    "no memory": mnemos.functional,
    "gated cache": cached,
    "gated cache, never written": lambda model: cached(model, write=False),
    "gated cache, gate nearly closed": lambda model: cached(model, gate_init=-4.0),  # by default -2
    "gated cache, decoder frozen": lambda model: cached(model, frozen=True),
    "memory tokens": remembering,
}


def fine_tuned(way: str, weights: dict[str, Tensor], task: ToldTask, seed: int, run: Path) -> Path:
    """The folder of one fine-tuning run, which is trained unless it has ended."""
    if not (run / "result.json").is_file():
        model = decoder(task.vocab_size)
        model.load_state_dict(weights)
        torch.manual_seed(seed)  # of the memory's weights
        adapted = WAYS[way](model)
        train = TrainConfig(batch_size=32, seed=seed, eval_every=STEPS, checkpoint_every=STEPS, threads=1)
        settings: dict[str, Any] = {"optim": OptimConfig(weight_decay=0.01), "train": train, "resume": run.is_dir()}
        mnemos.fit(adapted, task, out=run, steps=STEPS, lr=RATE, **settings)
    return run


def main() -> None:
    """Train the decoder and all ways, and print or write the table."""
    parser = argparse.ArgumentParser(description="What a memory gives a decoder that is already trained")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--result", type=Path, help="a JSON file of the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = ToldConfig(rows=500, grow=200).build()
    model = decoder(task.vocab_size)
    loss = pretrain(model, torch.from_numpy(task.text["train"]))
    print(f"the decoder: {loss:.2f} nats per word of its training text", flush=True)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    runs: dict[str, list[Path]] = {}
    for way in WAYS:
        place = options.out / way.replace(", ", "-").replace(" ", "-")
        runs[way] = [fine_tuned(way, weights, task, seed, place / f"seed-{seed}") for seed in range(options.seeds)]
    roles = {"gated cache": Role(memory="cache"), "gated cache, never written": Role(("gated cache",))}
    found = summarise(runs, options.out, roles=roles).as_json() | {"decoder": {"loss": loss, "updates": PRETRAINING}}
    for row in found["rows"]:
        print(row["name"], *(f"{at['x']}: {at['mean']:.3f} ± {at['std'] or 0:.3f}" for at in row["along"]["values"]))
    if options.result:
        write_text(options.result, json.dumps(found, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
