"""The default language model beside Llama of transformers: equal sizes, data and updates.

    python benchmarks/default_model.py --data FOLDER --out results/default_model.json

FOLDER has the splits train and valid (folders of text, gzipped or not), and test; without test the second half of valid
is taken for it. All models have the same width, layers, heads, hidden width of the MLP and a vocabulary of bytes; the
batches, the optimiser and the schedule are the same. The learning rate of each model is the best of `--rates` on the
validation split with the first seed; the test split is scored once per seed. A third model is this library's earlier
default: LayerNorm, GELU and sinusoids. Mistral, whose window is longer than these rows, is Llama: it gave the same
numbers.
"""

import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from command import command, write
from torch import Tensor, nn
from torch.nn import functional as F

import mnemos
from mnemos import libraries
from mnemos.lab.compare.significance import differences, interval, spread
from mnemos.lab.evaluate.records import to_json
from mnemos.lab.tasks.files import read_bytes
from mnemos.lab.tasks.text_files import find_text

DIM, LAYERS, HEADS, MLP, ROWS, TOKENS = 64, 2, 4, 176, 8, 256
SCORED = 64  # rows of `TOKENS` bytes of a split, evenly spaced
NAMES = ("mnemos", "mnemos, classic", "Llama")


class Theirs(nn.Module):
    """A model of transformers as `logits, state = model(x)`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.model(x, use_cache=False).logits, None


def build(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if name.startswith("mnemos"):
        sizes: dict[str, Any] = {"vocab_size": 256, "dim": DIM, "layers": LAYERS, "num_heads": HEADS}
        if name == "mnemos":
            return mnemos.Transformer(**sizes, mlp=MLP)
        # Two matrices as wide as the three of the gated MLP together.
        return mnemos.TransformerConfig.classic(**sizes, mlp=3 * MLP // 2).build()
    transformers = libraries.transformers()
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=DIM,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        tie_word_embeddings=False,
    )
    return Theirs(transformers.LlamaForCausalLM(config))


def read(folder: Path) -> dict[str, Tensor]:
    """The bytes of each split."""
    found = find_text(folder)
    if missing := {"train", "valid"} - set(found.splits):
        raise SystemExit(f"--data: expected a folder with the splits train and valid, found no {min(missing)}")
    whole: dict[str, bytes] = {split: b"\n".join(map(read_bytes, files)) for split, files in found.splits.items()}
    if "test" not in whole:
        half = len(whole["valid"]) // 2
        whole |= {"valid": whole["valid"][:half], "test": whole["valid"][half:]}
    return {split: torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for split, text in whole.items()}


def trained(name: str, seed: int, rate: float, steps: int, text: Tensor) -> nn.Module:
    model = build(name, seed).train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / warmup) * (1 + math.cos(math.pi * s / steps)) / 2
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        places = torch.randint(len(text) - TOKENS - 1, (ROWS,), generator=generator)
        batch = torch.stack([text[place : place + TOKENS + 1] for place in places.tolist()])
        loss = F.cross_entropy(model(batch[:, :-1])[0].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def bits(model: nn.Module, text: Tensor) -> float:
    """Bits per byte of `SCORED` rows."""
    places = torch.linspace(0, len(text) - TOKENS - 1, SCORED).long()
    rows = torch.stack([text[place : place + TOKENS + 1] for place in places.tolist()])
    losses = [F.cross_entropy(model(part[:, :-1])[0].flatten(0, 1), part[:, 1:].flatten()) for part in rows.split(8)]
    return float(torch.stack(losses).mean()) / math.log(2)


def main() -> None:
    parser = command(__doc__, steps=500, seeds=3, rates=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text, rows, scores = read(args.data), [], {}
    for name in NAMES:
        start, valid, models = time.time(), {}, {}
        for rate in args.rates:
            models[rate] = trained(name, 0, rate, args.steps, text["train"])
            valid[rate] = bits(models[rate], text["valid"])
            print(f"{name}, rate {rate:g}: {valid[rate]:.3f} bits per byte of the validation split", flush=True)
        best = min(valid, key=lambda rate: valid[rate])
        seeded = [models[best]]
        seeded += [trained(name, seed, best, args.steps, text["train"]) for seed in range(1, args.seeds)]
        scores[name] = [bits(model, text["test"]) for model in seeded]
        row = {"name": name, "rate": best, "valid": {f"{rate:g}": found for rate, found in valid.items()}}
        row |= {
            "values": scores[name],
            "mean": statistics.fmean(scores[name]),
            "std": statistics.stdev(scores[name]) if args.seeds > 1 else 0.0,
        }
        row |= {
            "parameters": sum(p.numel() for p in seeded[0].parameters()),
            "interval": interval(spread(scores[name])),
        }
        rows.append(row | {"seconds": time.time() - start})
        print(f"{name}: {row['mean']:.3f} ± {row['std']:.3f} bits per byte of the test split", flush=True)
    settings = {"steps": args.steps, "rows": ROWS, "tokens": TOKENS, "dim": DIM, "layers": LAYERS, "heads": HEADS}
    settings |= {"mlp": MLP, "scored rows": SCORED}
    found = {"metric": "bits per byte", "settings": settings, "rows": rows}
    found["against"] = to_json(differences({name: spread(values) for name, values in scores.items()}, "mnemos"))
    write(args.out, found)


if __name__ == "__main__":
    main()
