"""What the training of a linearised decoder gives: arms with the same tokens and updates, perplexity and recall.

    python benchmarks/linearised_arms.py run --model FOLDER --train TEXT TEXT --test TEXT ... --out FOLDER
                                             --arm hedgehog [--seed 0] [--tokens 131072]
    python benchmarks/linearised_arms.py told --model FOLDER --train TEXT --test TEXT --out FOLDER --arm told-hedgehog
                                              [--seed 0] [--updates 300] [--answers]
    python benchmarks/linearised_arms.py table --model FOLDER --out FOLDER --result results/linearised.json

`run` trains one arm with one seed and measures it on each test text: perplexity by position, bits per byte and, in the
first of the texts, recall of told facts. It can be killed at any moment; the same command continues it, and with more
--tokens it trains on from where the learning rate was constant. "original" and "window" are not trained. All runs share
the teacher's predictions in OUT/teacher.

`told` trains a memory on told facts (`fact_recall.py`): a state of constant size, one with a half-life, a gated cache
per stream and the same never written, memory tokens, and the window alone; all with a window of 64 tokens in the
decoder, frozen weights, and low-rank updates of the attentions from the seventh layer on, where the memories are. The
loss is that of the answers and that of the text; with `--answers` that of the answers alone, in OUT/ARM-answers. It
measures the recall of other facts in the test text, and the perplexity of that text as `run` does.

A test text is read in --pieces of 4,096 tokens, the first with --rows of told facts. --updates: each of one row.

`table` reads what is there: for each arm the share of the gap between "window" and "original" that it closes, in nats a
token, and the difference to windows that were trained alike with its 95 % interval, over seeds and over pieces of one;
and the recall of what was trained on told facts. Runs of other seeds and arms that the result file holds are kept.
"""

import argparse
import json
import math
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from command import command
from fact_recall import FactRecall, SegmentReading, fit_weights
from linearised import load_decoder, random_decoder, ranked, state_bytes

import mnemos
from mnemos.atomic import write_json, write_text
from mnemos.hosts.remembering import Segmented
from mnemos.lab.compare.significance import interval, paired, spread, welch
from mnemos.lab.linearised.assess import DISTANCES, Reading, assess, recall
from mnemos.lab.linearised.settings import HEADS, LinearisedConfig
from mnemos.lab.linearised.stages import Parameters
from mnemos.lab.linearised.text_batches import read_texts
from mnemos.lab.linearised.train import Training
from mnemos.lab.measure.flops import count_flops
from mnemos.lab.measure.gradients import state_bytes as bytes_of
from mnemos.lab.run.files import Measurement, read_object
from mnemos.lab.run.fit import OwnData, OwnModel
from mnemos.lab.run.kept_memory import keep_freed_memory
from mnemos.lab.run.provenance import command_line, now, provenance, source
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig
from mnemos.lab.run.run import Run
from mnemos.types import InputError

BASE = LinearisedConfig(state="hedgehog", rotary=True, half_life=0, transfer_rate=1e-2, transfer_tokens=49_152)
BEST = LinearisedConfig(half_life=0)  # the delta rule on features before rotary positions, and more attention transfer
WHOLE = 8192  # tokens of a window that has all of them
ARMS: dict[str, LinearisedConfig | None] = {
    "original": None,
    "window": replace(BASE, state="none", rank=0, tokens=0, transfer_tokens=0),
    "window-trained": replace(BASE, state="none"),
    "window-longer": replace(BASE, state="none"),  # with --tokens 212992, as many as both stages of a state have
    "hedgehog": BASE,
    "elu": replace(BASE, state="linear"),
    "delta": replace(BASE, state="delta"),  # what is in results/ was trained with β at the maps' rate
    "delta-longer": replace(BASE, state="delta"),  # with twice the --tokens
    "delta-transferred": replace(BEST, rotary=True),
    "delta-before-rotary": BEST,
    "delta-forgets": LinearisedConfig(),
    # With WikiText-2's training split in --train, and another --out:
    "delta-forgets-wiki": LinearisedConfig(),
    "window-wiki": replace(BASE, state="none"),
    "delta-forgets-wiki-longer": LinearisedConfig(),  # with more --tokens
    "window-wiki-longer": replace(BASE, state="none"),
    # Hybrids, with the same texts: the attentions that `benchmarks/hybrids.py rank` puts first are whole.
    "hybrid-8": LinearisedConfig(full=("8",)),
    "hybrid-12": LinearisedConfig(full=("12",)),
    "window-hybrid-8": replace(BASE, state="none", full=("8",)),
    "untrained-hybrid-8": replace(BASE, state="none", rank=0, tokens=0, transfer_tokens=0, full=("8",)),
    "window-hybrid-12": replace(BASE, state="none", full=("12",)),
    "hybrid-8-bf16": LinearisedConfig(full=("8",), precision="bf16-mixed"),
    "hybrid-8-labels": LinearisedConfig(full=("8",), loss="labels"),
    "window-hybrid-8-labels": replace(BASE, state="none", full=("8",), loss="labels"),
    # The decoder itself, its updates trained alike: a window of more than the test's 4,096 tokens is all of them.
    "whole-labels": replace(BASE, state="none", window=WHOLE, loss="labels"),
    # The tokens of hybrid-8-bf16, of six novels and WikiText-2, about half and half, in another --out.
    "hybrid-8-novels": LinearisedConfig(full=("8",), precision="bf16-mixed"),
    "hybrid-8-longer": LinearisedConfig(full=("8",), precision="bf16-mixed"),  # with 163,840 --tokens
    # By key head, those whose trained share of whole attention is largest (`benchmarks/hybrids.py gates`).
    "heads-24": LinearisedConfig(full=("24", *HEADS)),
    "window-heads-24": replace(BASE, state="none", full=("24", *HEADS)),
    "delta-labels": replace(BEST, loss="labels"),
    "window-labels": replace(BASE, state="none", loss="labels"),
    # The window with another memory than a state, in or around all attentions; stage 2 alone:
    "window-cache": replace(BASE, state="none", transfer_tokens=0),
    "window-cache-unwritten": replace(BASE, state="none", transfer_tokens=0),
    # As benchmarks/trained_decoder.py has it: in the upper layers alone, with a gate that begins nearly closed.
    "window-cache-few": replace(BASE, state="none", transfer_tokens=0, map_rate=1e-3),
    "window-remember": replace(BASE, state="none", transfer_tokens=0),
}
MEMORIES = ("cache", "cache-unwritten", "remember", "cache-few")
# Window 64, 4 sinks, rank 16. Features of queries and keys before rotary positions, which facts at all distances share.
KINDS = ("window", "hedgehog", "delta", "delta-forgets", "cache", "cache-unwritten", "remember")
TOLD = tuple(f"told-{kind}" for kind in KINDS)
FORGETS = "-forgets"  # of a state that halves in 1,024 tokens
ALONE = "-answers"  # of arms that learn the answers alone
LOWER, SCALE = 6, 1.5  # layers that have the window alone and no updates; the factor of feature maps at the start
SLOTS, BLOCK, TOKENS = 16, 32, 16  # of the gated cache, and memory tokens; a segment has window − 2·TOKENS tokens
RATES = {"updates": 2e-3, "maps": 1e-2, "weights": 5e-2, "memory": 3e-3}
FLOOR, CEILING, AGAINST = "window", "original", "window-trained"
# What an arm differs from in one thing: the window that was trained alike, where it is not AGAINST, or another arm.
CONTROLS = {"delta-forgets-wiki": "window-wiki", "delta-labels": "window-labels"}
CONTROLS["delta-forgets-wiki-longer"] = "window-wiki-longer"
CONTROLS |= {arm: f"window-{arm}" for arm in ("hybrid-8", "hybrid-8-labels", "hybrid-12", "heads-24")}
CONTROLS |= {"hybrid-8-bf16": "hybrid-8", "hybrid-8-longer": "hybrid-8-bf16"}
CONTROLS["hybrid-8-novels"] = "hybrid-8-bf16"
FAR = "512-4096"


def run(options: argparse.Namespace) -> None:
    """Train and measure one arm with one seed."""
    model, tokenizer = load_decoder(options.model)
    place = options.out / options.arm / f"seed-{options.seed}"
    place.mkdir(parents=True, exist_ok=True)
    settings, reader = _settings(options.arm, options.ranking), model
    if settings is not None:
        settings = replace(settings, seed=options.seed)
        if settings.tokens:
            settings = replace(settings, tokens=options.tokens)
        texts = read_texts(options.train)
        about = {"name": options.model.name}
        kind = options.arm.removeprefix("window-")
        training = MemoryTraining(
            kind, model, tokenizer, texts, settings, place, teacher=options.out / "teacher", about=about
        )
        training.run()
        reader = training.reader
    begin = Reading if reader is model else SegmentReading
    folder = place / f"assessed-{settings.tokens if settings is not None else 0}"
    folder.mkdir(exist_ok=True)
    for i, (name, text) in enumerate(read_texts(options.test).items()):
        path = folder / f"{name}.json"
        if not path.is_file():
            rows = 0 if i else options.rows
            write_json(path, assess(reader, tokenizer, text, pieces=options.pieces, rows=rows, begin_reading=begin))
            print(f"{options.arm} seed {options.seed}: {name} measured", flush=True)
    costs = _costs(model) if options.arm.removeprefix("window-") not in MEMORIES else {}  # of those see `table`
    write_json(folder / "run.json", provenance(options.seed, "cpu") | costs | {"finished": now()})


def _settings(arm: str, ranking: Path) -> LinearisedConfig | None:
    """The settings of an arm; a hybrid's with the names of its whole attentions."""
    settings = ARMS[arm]
    if settings is not None and (count := settings.full_count) is not None:
        settings = replace(settings, full=tuple(ranked(ranking, count, settings.full[1:] == HEADS)))
    return settings


class MemoryTraining(Training):
    """`Training`, of a kind in MEMORIES with that memory beside the window; it learns at the feature maps' rate.

    `reader` is what has the memory: the decoder itself, or the wrapper with its memory tokens.
    """

    reader: Any

    def __init__(self, kind: str, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.reader = self.decoder
        if kind in MEMORIES:
            if self.teacher is not None:  # while the decoder has no memory
                groups = -(-self.settings.tokens // (self.settings.rows * self.settings.context))
                for group in range(groups):
                    numbers = self.pieces.group(group, self.settings.rows)
                    self.teacher.predictions(numbers, self.pieces.ids[numbers])
            names = [one.name for one in self.report.changed]
            self.reader, self.maps = add_memory(self.decoder, kind, names, self.settings.window)
            self.step = mnemos.functional(self.decoder) if self.reader is self.decoder else self.reader


def add_memory(model: Any, kind: str, where: list[str], window: int) -> tuple[Any, dict[str, Any]]:
    """Add a memory to a decoder with a window: what reads with it, and its new parameters; none of other kinds."""
    if kind.startswith("cache"):
        grc = mnemos.GRC(scope="stream", length=SLOTS, block=BLOCK)
        if kind == "cache-few":
            grc, where = mnemos.GRC(scope="stream", length=SLOTS, block=2 * BLOCK, gate_init=-4.0), where[14::3]
        mnemos.cache(model, grc.unwritten() if kind == "cache-unwritten" else grc, where=where)
        return model, {name: value for name, value in model.named_parameters() if ".grc." in name}
    if kind == "remember":
        remembering = mnemos.remember(model, tokens=TOKENS)
        return Segmented(remembering, window - 2 * TOKENS), dict(remembering.memory.named_parameters())
    return model, {}


def told(options: argparse.Namespace) -> None:
    """Train one memory on told facts with one seed, and measure what it recalls and predicts."""
    place = options.out / (options.arm + (ALONE if options.answers else "")) / f"seed-{options.seed}"
    if all((place / name).is_file() for name in ("told.json", "predicted.json")):
        return
    model, tokenizer = load_decoder(options.model)
    model.requires_grad_(False)
    novels = [next(iter(read_texts(paths[:1]).values())) for paths in (options.train, options.test)]
    text, test = (torch.tensor(tokenizer(novel, add_special_tokens=False)["input_ids"]) for novel in novels)
    torch.manual_seed(options.seed)
    kind = options.arm.removeprefix("told-")
    half_life = 1024 if kind.endswith(FORGETS) else 0
    kind = kind.removesuffix(FORGETS)
    state: Any = kind if kind in ("hedgehog", "delta") else "none"
    names = [f"model.layers.{i}.self_attn" for i in range(model.config.num_hidden_layers)]
    mnemos.linearise(model, state="none", where=names[:LOWER])
    report = mnemos.linearise(model, state=state, rank=16, half_life=half_life, where=names[LOWER:])
    changed = {one.name: model.get_submodule(one.name) for one in report.changed}
    parts: dict[str, dict[str, Any]] = {"updates": dict(report.updates), "maps": {}, "weights": {}, "memory": {}}
    for name, value in report.maps.items():
        parts["weights" if name.endswith(("log_gamma", "rate")) else "maps"][name] = value
    reader, parts["memory"] = add_memory(model, kind, names[LOWER:], report.settings.window)

    def predict(ids: torch.Tensor) -> Any:
        return model(input_ids=ids, use_cache=False).logits[0] if reader is model else reader(ids)[0][0]

    folder = place / "training"
    resume = (folder / "recipe.json").is_file()
    if state != "none" and not resume:
        with torch.no_grad():
            for value in parts["maps"].values():
                value.mul_(SCALE)
        fit_weights(model, changed, text[None, :768])
    rates = {name: RATES[part] for part, values in parts.items() for name in values}
    named = {name: value.requires_grad_(True) for values in parts.values() for name, value in values.items()}
    parameters = Parameters(named, rates, rate := max(rates.values()))
    language = float(not options.answers)
    transferred = changed if state != "none" else None
    task = FactRecall(tokenizer, text, options.updates, predict, language, model, transferred)
    schedule = ScheduleConfig("trapezoid", warmup=10, fall=0.2)
    often = {"log_every": 20, "checkpoint_every": 20, "eval_every": 2**62, "keep": 1}
    recipe = Recipe(
        name=options.arm,
        model=OwnModel("told facts", sum(value.numel() for value in named.values())),
        data=OwnData(train=f"{len(text)} tokens, language {language}"),
        optim=OptimConfig(lr=rate, betas=(0.9, 0.98), weight_decay=0.0, schedule=schedule),
        train=TrainConfig(steps=options.updates, batch_size=1, seed=options.seed, accelerator="cpu", **often),
    )
    result = Run.open(recipe, folder, resume, task=task, model=parameters).train(count_flops=False)
    names_of = {"loss": "answers", "right": "right", "text": "text"}
    trained = {"updates": options.updates, **{name: result.valid[metric] for name, metric in names_of.items()}}
    begin = Reading if reader is model else SegmentReading
    about = provenance(options.seed, "cpu") | {"command": command_line()}
    if not (place / "told.json").is_file():
        found = recall(reader.eval(), tokenizer, test, options.rows, begin_reading=begin)
        write_json(place / "told.json", {"training": trained, "recall": found, "about": about | {"finished": now()}})
    found = assess(reader.eval(), tokenizer, novels[1], pieces=options.pieces, rows=0, begin_reading=begin)
    write_json(place / "predicted.json", found | {"about": about | {"finished": now()}})


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
    kept: Any = read_object(options.result) if options.result.is_file() else {"rows": [], "told": {}}
    earlier = {row["name"]: row.get("runs", []) for row in kept["rows"]} | kept["told"]
    found: dict[str, list[dict[str, Any]]] = {}
    for arm in ARMS:
        found[arm] = []
        for place in sorted((options.out / arm).glob("seed-*")):
            done = [folder for folder in place.glob("assessed-*") if (folder / "run.json").is_file()]
            if done:
                found[arm].append(_read(place, max(done, key=_tokens)))
        found[arm] = _joined(found[arm], earlier.get(arm, []))
    far = {arm: [_mean(one, FAR) for one in runs] for arm, runs in found.items() if runs}
    floor, ceiling = (statistics.fmean(far[name]) if name in far else None for name in (FLOOR, CEILING))
    rows = []
    for arm, runs in found.items():
        if not runs:
            rows.append({"name": arm, "seeds": 0, "waits": True})
            continue
        row: dict[str, Any] = {"name": arm, "seeds": len(runs), "tokens": runs[0]["tokens"], "runs": runs}
        if len(read := {one["tokens"] for one in runs}) > 1:
            raise InputError(f"{arm}: expected runs of equal tokens, found {sorted(read)}; train the others as long")
        nats = spread(far[arm])
        row |= {"mean": nats.mean, "std": nats.std if len(runs) > 1 else None, "interval": interval(nats)}
        if (kind := arm.removeprefix("window-")) in MEMORIES:
            row |= _memory_costs(kind, ARMS[arm], options.model)
        else:
            row["token_flops"] = statistics.fmean(one["token_flops"] for one in runs)
            size = _state_bytes(_settings(arm, options.ranking), options.model)
            row["state_bytes"] = runs[0]["state_bytes"] if size is None else size
            for one in runs if size is not None else ():
                one.pop("state_bytes", None)  # what a run measured has the spare columns of its buffers
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
            row["gap_closed_of_texts"] = {
                text: [(low - one) / (low - high) for one in _means(runs, text)]
                for text in runs[0]["texts"]
                for low, high in [[statistics.fmean(_means(found[name], text)) for name in (FLOOR, CEILING)]]
            }
        control = CONTROLS.get(arm, AGAINST)
        if control in far and arm not in (control, FLOOR, CEILING):
            row["against"] = {"name": control} | _against(found[arm], found[control])
        recall = [part["recall"] for one in runs for part in one["texts"].values() if "recall" in part]
        if recall:
            row["recall"] = [
                {"distance": d, "questions": sum(len(e["choice"]) for e in entries)}
                | {score: statistics.fmean(x for e in entries for x in e[score]) for score in ("choice", "own_words")}
                for i, d in enumerate(DISTANCES)
                for entries in [[one["distances"][i] for one in recall]]
            ]
        rows.append(row)
    told_runs: dict[str, list[dict[str, Any]]] = {}
    for arm in (arm + end for arm in TOLD for end in ("", ALONE)):
        runs = _joined([*map(_told, (options.out / arm).glob("seed-*/told.json"))], earlier.get(arm, []))
        told_runs |= {arm: runs} if runs else {}
    result = {
        "metric": f"nats a token at positions {FAR}, the mean over pieces of the test texts",
        "higher_is_better": False,
        "rows": rows,
        "told": told_runs,
        "machine": "; ".join(sorted({one["cpu"] for runs in (*found.values(), *told_runs.values()) for one in runs})),
        "command": command_line(),
        "reported": source(),
    }
    write_text(options.result, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    for row in rows:
        if row["seeds"]:
            closed = statistics.fmean(row["gap_closed"]) if "gap_closed" in row else float("nan")
            told = (f"{at['distance']}: {at['choice']:.2f}/{at['own_words']:.2f}" for at in row.get("recall", ()))
            print(
                f"{row['name']:24} {row['tokens']:>8} tokens  {row['mean']:.4f} nats  {closed:6.1%} of the gap", *told
            )


def _state_bytes(settings: LinearisedConfig | None, model: Path) -> int | None:
    """Bytes of state after 4,096 tokens, from a model without weights; None: of whole attention, which was measured."""
    if settings is None or settings.window == WHOLE:
        return None
    with torch.device("meta"):
        decoder = random_decoder(model)
    report = mnemos.linearise(decoder, **settings.arguments, full=settings.full or None)
    config = decoder.config
    whole = sum(len(one.full_heads) for one in report.changed) + len(report.left) * config.num_key_value_heads
    return sum(one.state_bytes for one in report.changed) + whole * 4096 * 2 * config.head_dim * 4  # in float32


def _memory_costs(kind: str, settings: LinearisedConfig | None, model: Path) -> dict[str, float]:
    """Bytes of state, and FLOPs of a token that is read alone, the mean of a block; of a model with random weights."""
    assert settings is not None
    decoder = random_decoder(model)
    report = mnemos.linearise(decoder, **settings.arguments)
    reader, _ = add_memory(decoder, kind, [one.name for one in report.changed], settings.window)
    step: Any = mnemos.functional(decoder) if reader is decoder else reader
    ids, flops = torch.zeros(1, 1024, dtype=torch.int64), 0.0
    with torch.no_grad():
        _, state = step(ids)
        for _ in range(BLOCK):
            flops += count_flops(partial(step, ids[:, :1], state))
            _, state = step(ids[:, :1], state)
    return {"state_bytes": bytes_of(state), "token_flops": flops / BLOCK}


def _tokens(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _read(place: Path, folder: Path) -> dict[str, Any]:
    """One run: its texts' measurements, costs, commit and training, with the loss of each piece of stage 2."""
    about = read_object(folder / "run.json")
    texts = {path.stem: read_object(path) for path in sorted(folder.glob("*.json")) if path.name != "run.json"}
    kept = "seed", "commit", "dirty", "state_bytes", "token_flops", "cpu", "finished"
    found = {name: about.get(name) for name in kept}
    result = read_object(place / "result.json") if (place / "result.json").is_file() else {}
    stage = place / "next_token"
    lines = [*Measurement.read_all(stage)] if (stage / Measurement.FILE).is_file() else []
    steps = {one.step: one.values["loss"] for one in lines if one.kind == "train"}
    found |= {
        "tokens": _tokens(folder),
        "stages": result.get("stages", {}),
        "losses": [steps[step] for step in sorted(steps)],
    }
    return found | {"texts": texts, "parameters": result.get("parameters", {})}


def _joined(new: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new runs, and the earlier ones of other seeds, by seed."""
    seeds = {one["seed"] for one in new}
    return sorted([*new, *(one for one in earlier if one["seed"] not in seeds)], key=lambda one: one["seed"])


def _told(path: Path) -> dict[str, Any]:
    """One run of `told`: training, recall, commit, and predictions where they were measured."""
    kept = "seed", "commit", "dirty", "cpu", "finished"
    run, found = read_object(path), {}
    if (file := path.with_name("predicted.json")).is_file():
        predicted = read_object(file)
        about = predicted.pop("about")
        found = {"predicted": predicted | {name: about.get(name) for name in kept}}
    about = {name: run["about"].get(name) for name in kept}
    return about | {"training": run["training"], "recall": run["recall"]} | found


def _pieces(run: dict[str, Any], name: str) -> list[float]:
    return [nats for text in sorted(run["texts"]) for nats in run["texts"][text]["positions"][name]["nats"]]


def _means(runs: list[dict[str, Any]], text: str) -> list[float]:
    """Nats a token of one text at FAR, of each run."""
    return [statistics.fmean(one["texts"][text]["positions"][FAR]["nats"]) for one in runs]


def _mean(run: dict[str, Any], name: str) -> float:
    return statistics.fmean(_pieces(run, name))


def _against(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, Any]:
    """The difference of nats to the other arm: over seeds, and over pieces of text with the first seed of both."""
    changes = [a - b for a, b in zip(_pieces(runs[0], FAR), _pieces(others[0], FAR), strict=True)]
    by_piece = paired(changes)
    found: dict[str, Any] = {"pieces": len(changes)}
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
    sizes = {"seed": 0, "tokens": 131_072, "updates": 300, "answers": False, "pieces": 4, "rows": 10}
    parser = command(__doc__, out=Path, ranking=Path("results/attention_ranking.json"), **sizes)
    parser.add_argument("do", choices=("run", "told", "table"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--train", type=Path, nargs="+")
    parser.add_argument("--test", type=Path, nargs="+")
    parser.add_argument("--arm", choices=(*ARMS, *TOLD))
    parser.add_argument("--result", type=Path, help="the file of the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    {"run": run, "told": told, "table": table}[options.do](options)


if __name__ == "__main__":
    main()
