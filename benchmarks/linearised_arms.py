"""What the training of a linearised decoder gives: arms with the same tokens and updates, perplexity and recall.

    python benchmarks/linearised_arms.py run --model FOLDER --train TEXT TEXT --test TEXT ... --out FOLDER
                                             --arm hedgehog [--seed 0] [--tokens 131072]
    python benchmarks/linearised_arms.py table --model FOLDER --out FOLDER --result results/linearised.json

`run` trains one arm with one seed and measures it on each test text: perplexity by position, bits per byte and, in the
first of the texts, recall of told facts. It can be killed at any moment; the same command continues it, and with more
--tokens it trains on from where the learning rate was constant. "original" and "window" are not trained. All runs share
the teacher's predictions in OUT/teacher. `table` reads what is there: for each arm the share of the gap between
"window" and "original" that it closes, in nats a token, and the difference to "window-trained" with its 95 % interval,
over seeds, and over pieces of text for one seed.
"""

import argparse
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import mnemos
from mnemos.atomic import write_json
from mnemos.lab.compare.significance import interval, paired, spread, welch
from mnemos.lab.linearised.assess import DISTANCES, Reading, assess, state_bytes
from mnemos.lab.linearised.pieces import read_texts
from mnemos.lab.linearised.settings import LinearisedConfig
from mnemos.lab.linearised.train import Training
from mnemos.lab.measure.flops import count_flops
from mnemos.lab.run.files import read_object
from mnemos.lab.run.kept_memory import keep_freed_memory
from mnemos.lab.run.provenance import command_line, now, provenance, source

BASE = LinearisedConfig()
ARMS: dict[str, LinearisedConfig | None] = {
    "original": None,
    "window": replace(BASE, state="none", rank=0, tokens=0, transfer_tokens=0),
    "window-trained": replace(BASE, state="none"),
    "hedgehog": BASE,
    "hedgehog-fitted": replace(BASE, fit_tokens=2048, transfer_tokens=0),
    "elu": replace(BASE, state="linear"),
    "delta": replace(BASE, state="delta"),
    "hedgehog-before-rotary": replace(BASE, rotary=False),
    "hedgehog-labels": replace(BASE, loss="labels"),
    "window-labels": replace(BASE, state="none", loss="labels"),
}
FLOOR, CEILING, AGAINST = "window", "original", "window-trained"
FAR = "512-4096"


def run(options: argparse.Namespace) -> None:
    """Train and measure one arm with one seed."""
    transformers = mnemos.libraries.transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="float32").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    place = options.out / options.arm / f"seed-{options.seed}"
    place.mkdir(parents=True, exist_ok=True)
    settings = ARMS[options.arm]
    if settings is not None:
        settings = replace(settings, seed=options.seed)
        if settings.tokens:
            settings = replace(settings, tokens=options.tokens)
        texts = read_texts(options.train)
        about = {"name": options.model.name}
        Training(model, tokenizer, texts, settings, place, teacher=options.out / "teacher", about=about).run()
    folder = place / f"assessed-{settings.tokens if settings is not None else 0}"
    folder.mkdir(exist_ok=True)
    for i, (name, text) in enumerate(read_texts(options.test).items()):
        path = folder / f"{name}.json"
        if not path.is_file():
            write_json(path, assess(model, tokenizer, text, pieces=options.pieces, rows=0 if i else options.rows))
            print(f"{options.arm} seed {options.seed}: {name} measured", flush=True)
    write_json(folder / "run.json", provenance(options.seed, "cpu") | _costs(model) | {"finished": now()})


def _costs(model: Any) -> dict[str, int]:
    """Bytes of the cache's tensors after 4,096 tokens, which count for the original, and FLOPs of a token there."""
    reading, ids = Reading(model), torch.zeros(1024, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(4):
            reading.read(ids)
        flops = count_flops(lambda: reading.read(ids[:1]))
    return {"state_bytes": state_bytes(reading.cache), "token_flops": flops}


def table(options: argparse.Namespace) -> None:
    """Collect the runs of all arms in one file."""
    found: dict[str, list[dict[str, Any]]] = {}
    for arm in ARMS:
        found[arm] = []
        for place in sorted((options.out / arm).glob("seed-*")):
            done = [folder for folder in place.glob("assessed-*") if (folder / "run.json").is_file()]
            if done:
                newest = max(done, key=lambda folder: int(folder.name.rpartition("-")[2]))
                found[arm].append(_read(place, newest))
    far = {arm: [_mean(one, FAR) for one in runs] for arm, runs in found.items() if runs}
    floor, ceiling = (statistics.fmean(far[name]) if name in far else None for name in (FLOOR, CEILING))
    rows = []
    for arm, runs in found.items():
        if not runs:
            rows.append({"name": arm, "seeds": 0, "waits": True})
            continue
        row: dict[str, Any] = {"name": arm, "seeds": len(runs), "tokens": runs[0]["tokens"], "runs": runs}
        nats = spread(far[arm])
        row |= {"mean": nats.mean, "std": nats.std if len(runs) > 1 else None, "interval": interval(nats)}
        row["token_flops"] = statistics.fmean(one["token_flops"] for one in runs)
        row["state_bytes"] = _state_bytes(ARMS[arm], options.model) or runs[0]["state_bytes"]
        row["perplexity"] = {
            text: {
                name: statistics.fmean(one["texts"][text]["positions"][name]["perplexity"] for one in runs)
                for name in runs[0]["texts"][text]["positions"]
            }
            for text in runs[0]["texts"]
        }
        row["positions"] = {
            name: math.exp(statistics.fmean(_mean(one, name) for one in runs)) for name in ("0-64", "64-512", FAR)
        }
        row["bits_per_byte"] = statistics.fmean(
            bits for one in runs for text in one["texts"].values() for bits in text["bits_per_byte_of_pieces"]
        )
        if floor is not None and ceiling is not None:
            row["gap_closed"] = [(floor - one) / (floor - ceiling) for one in far[arm]]
        if AGAINST in far and arm not in (AGAINST, FLOOR, CEILING):
            row["against"] = _against(found[arm], found[AGAINST])
        recall = [part["recall"] for one in runs for part in one["texts"].values() if "recall" in part]
        if recall:
            row["recall"] = [
                {"distance": d, "questions": sum(len(e["choice"]) for e in entries)}
                | {score: statistics.fmean(x for e in entries for x in e[score]) for score in ("choice", "own_words")}
                for i, d in enumerate(DISTANCES)
                for entries in [[one["distances"][i] for one in recall]]
            ]
        rows.append(row)
    result = {
        "metric": f"nats a token at positions {FAR}, the mean over pieces of the test texts",
        "higher_is_better": False,
        "rows": rows,
        "machine": provenance(0, "cpu")["cpu"],
        "command": command_line(),
        "reported": source(),
    }
    options.result.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    for row in rows:
        if row["seeds"]:
            closed = statistics.fmean(row["gap_closed"]) if "gap_closed" in row else float("nan")
            print(f"{row['name']:24} {row['tokens']:>8} tokens  {row['mean']:.4f} nats  {closed:6.1%} of the gap")
            print(
                "   ", *(f"{at['distance']}: {at['choice']:.2f}/{at['own_words']:.2f}" for at in row.get("recall", ()))
            )


def _state_bytes(settings: LinearisedConfig | None, model: Path) -> int | None:
    """Bytes of state of a linearised arm, from a model without weights; None: of the original, which was measured."""
    if settings is None:
        return None
    transformers = mnemos.libraries.transformers()
    with torch.device("meta"):
        decoder = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(model))
    return sum(one.state_bytes for one in mnemos.linearise(decoder, **settings.arguments).changed)


def _read(place: Path, folder: Path) -> dict[str, Any]:
    """One run: its texts' measurements, costs, commit and training."""
    about = read_object(folder / "run.json")
    texts = {path.stem: read_object(path) for path in sorted(folder.glob("*.json")) if path.name != "run.json"}
    found = {
        name: about.get(name) for name in ("seed", "commit", "dirty", "state_bytes", "token_flops", "cpu", "finished")
    }
    result = read_object(place / "result.json") if (place / "result.json").is_file() else {}
    tokens = int(folder.name.rpartition("-")[2])
    return (
        found
        | {"tokens": tokens, "stages": result.get("stages", {}), "texts": texts}
        | {
            "parameters": result.get("parameters", {}),
        }
    )


def _pieces(run: dict[str, Any], name: str) -> list[float]:
    return [nats for text in sorted(run["texts"]) for nats in run["texts"][text]["positions"][name]["nats"]]


def _mean(run: dict[str, Any], name: str) -> float:
    return statistics.fmean(_pieces(run, name))


def _against(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, Any]:
    """The difference of nats to the other arm: over seeds, and over pieces of text with the first seed of both."""
    changes = [a - b for a, b in zip(_pieces(runs[0], FAR), _pieces(others[0], FAR), strict=True)]
    by_piece = paired(changes)
    found: dict[str, Any] = {"name": AGAINST, "pieces": len(changes)}
    if by_piece is not None:
        found["over_pieces"] = {"difference": by_piece.difference, "interval": by_piece.interval}
    if min(len(runs), len(others)) > 1:
        mean = [{one["seed"]: _mean(one, FAR) for one in arm} for arm in (runs, others)]
        over = welch(*(spread(list(arm.values())) for arm in mean))
        found["over_seeds"] = {"difference": over.difference, "interval": over.interval, "p": over.p}
        by_seed = paired([mean[0][seed] - mean[1][seed] for seed in mean[0] if seed in mean[1]])
        if by_seed is not None:
            found["over_seeds_paired"] = {"difference": by_seed.difference, "interval": by_seed.interval}
    return found


def main() -> None:
    """Parse the arguments and do what they say."""
    parser = argparse.ArgumentParser(description="What the training of a linearised decoder gives")
    parser.add_argument("do", choices=("run", "table"))
    parser.add_argument("--out", type=Path, required=True, help="the folder of all runs")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--train", type=Path, nargs="+")
    parser.add_argument("--test", type=Path, nargs="+")
    parser.add_argument("--arm", choices=tuple(ARMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--pieces", type=int, default=4, help="pieces of 4,096 tokens of each test text")
    parser.add_argument("--rows", type=int, default=10, help="told facts")
    parser.add_argument("--result", type=Path, help="the file of the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    (table if options.do == "table" else run)(options)


if __name__ == "__main__":
    main()
