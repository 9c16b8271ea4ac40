"""The tools of this library on a trained decoder: streams, drafts, replay, and a novel read with a gated cache.

    python benchmarks/trained_decoder.py PART --model FOLDER [--text FILE ..] [--result results/trained_decoder.json]

FOLDER is a decoder of Transformers with its tokenizer, made for SmolLM2-135M-Instruct; texts are novels, plain or .gz.
Each part adds its figures to the JSON file under its own name:

    decode        Stream, and drafts by look-up and by smaller models, beside `generate` and its prompt look-up: tokens
                  a second of decoding, and whether the greedy tokens are the same
    pages         many questions on one page: a PrefixTree beside reading the page for each
    replay        gradients through many tokens: peak and time of `replay` beside activation checkpointing
    train         gated caches per stream in the upper layers of the frozen decoder, by `replay` (resumes itself)
    novel         a novel in segments: the decoder alone, with the caches carried, and with them reset at each segment
"""

import argparse
import gzip
import json
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mnemos
from mnemos.hugging_face.hosted_decoder import HostedDecoderConfig
from mnemos.hugging_face.hub import settings_of
from mnemos.lab.run.provenance import provenance
from mnemos.types import detach, leaves

SEGMENT, SEGMENTS, RATE = 256, 4, 1e-3  # tokens that the decoder reads together; segments of an update; learning rate
CACHED = (14, 17, 20, 23, 26, 29)  # layers with a cache; nothing below the first needs a gradient
CACHE = mnemos.GRC(scope="stream", length=16, block=64, gate_init=-4.0)
PART = 10_000  # tokens of a novel whose figures are added up


def read_text(path: Path) -> str:
    """A novel with each paragraph in one line, without the licence of Project Gutenberg."""
    found = (gzip.open(path) if path.suffix == ".gz" else path.open("rb")).read().decode("utf-8-sig")
    found = re.split(r"\*\*\* ?END OF TH.*", re.split(r"\*\*\* ?START OF TH.*", found)[-1])[0]
    paragraphs = re.split(r"\r?\n\s*\r?\n", found)
    return "\n\n".join(" ".join(one.split()) for one in paragraphs if one.strip())


def state_bytes(state: Any) -> int:
    return sum(x.numel() * x.element_size() for x in leaves(state))


def tokens_of(options: argparse.Namespace, path: Path, count: int | None = None) -> Tensor:
    """The first tokens [T] of a novel."""
    return torch.tensor(options.tokenizer(read_text(path))["input_ids"][:count])


def hosted(options: argparse.Namespace, cached: bool) -> nn.Module:
    """The decoder read in segments, with new caches or without."""
    config = HostedDecoderConfig(settings_of(options.model), options.tokenizer.vocab_size, SEGMENT)
    torch.manual_seed(0)
    model = config.build()
    model.load_state_dict(model.pretrained(options.model))
    if cached:
        where = [f"model.layers.{i}.self_attn" for i in CACHED]
        mnemos.cache(model.host, CACHE, where=where)
    return model.eval()


def caches(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if ".grc." in name}


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train the caches alone on the texts, a row each; continues from the last checkpoint."""
    rows = torch.stack([tokens_of(options, path, options.tokens) for path in options.text])
    model = hosted(options, cached=True)
    learned = caches(model.requires_grad_(False))
    optimizer = torch.optim.AdamW([one.requires_grad_() for one in learned.values()], RATE, weight_decay=0.01)
    checkpoint, state, losses, seconds = options.folder / "checkpoint.pt", None, [], 0.0
    if checkpoint.is_file():
        found = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(found["caches"], strict=False)
        optimizer.load_state_dict(found["optimizer"])
        state, losses, seconds = found["state"], found["losses"], found["seconds"]

    def step(segment: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits, state = model(segment[:, :-1], state)
        return F.cross_entropy(logits.flatten(0, 1), segment[:, 1:].flatten()), state

    began = time.perf_counter()
    last = min(options.updates, (rows.shape[1] - 1) // (SEGMENT * SEGMENTS))
    for i in range(len(losses), last):
        start = i * SEGMENT * SEGMENTS
        segments = [rows[:, s : s + SEGMENT + 1] for s in range(start, start + SEGMENT * SEGMENTS, SEGMENT)]
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (i + 1) / 10)
        found = mnemos.replay(step, segments, state, module=model)
        nn.utils.clip_grad_norm_(learned.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state = detach(found.state)
        losses.append(float(found.loss))
        if (i + 1) % 10 == 0 or i + 1 == last:
            print(f"update {i + 1}: {sum(losses[-10:]) / 10:.3f} nats, {time.perf_counter() - began:.0f} s", flush=True)
            kept = {"caches": {name: one.detach() for name, one in learned.items()}, "state": state, "losses": losses}
            kept |= {"optimizer": optimizer.state_dict(), "seconds": seconds + time.perf_counter() - began}
            options.folder.mkdir(parents=True, exist_ok=True)
            torch.save(kept, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    count = sum(one.numel() for one in learned.values())
    seconds += time.perf_counter() - began
    return {"texts": [path.name for path in options.text], "updates": last, "tokens": last * SEGMENT * SEGMENTS * len(rows),
            "parameters": count, "seconds": seconds, "losses": [round(x, 4) for x in losses]}  # fmt: skip


ARMS = ("decoder alone", "caches carried", "caches reset")


def novel(options: argparse.Namespace) -> dict[str, Any]:
    """Read a novel in segments, in one way, and add up loss, time and memory for each PART tokens."""
    ids = tokens_of(options, options.text[0], options.tokens + 1)[None]
    model = hosted(options, cached=options.arm != "decoder alone")
    if options.arm != "decoder alone":
        model.load_state_dict(torch.load(options.folder / "checkpoint.pt", weights_only=False)["caches"], strict=False)
    parts: list[dict[str, Any]] = []
    state, found = None, {"tokens": 0, "nats": 0.0, "early": 0.0, "early tokens": 0}
    began = time.perf_counter()
    with torch.no_grad():
        for start in range(0, ids.shape[1] - 1, SEGMENT):
            segment = ids[:, start : start + SEGMENT + 1]
            logits, state = model(segment[:, :-1], None if options.arm == "caches reset" else state)
            nats = F.cross_entropy(logits[0], segment[0, 1:], reduction="none")
            found["tokens"] += len(nats)
            found["nats"] += float(nats.sum())
            found["early"] += float(nats[:64].sum())
            found["early tokens"] += len(nats[:64])
            if found["tokens"] >= PART or start + SEGMENT >= ids.shape[1] - 1:
                seconds = time.perf_counter() - began
                found |= {"seconds": seconds, "resident bytes": resident(), "state bytes": state_bytes(state)}
                parts.append(found)
                print(f"{start + SEGMENT:,} tokens: {found['nats'] / found['tokens']:.4f} nats, {seconds:.1f} s, "
                      f"{found['resident bytes'] / 2**20:.0f} MiB", flush=True)  # fmt: skip
                found, began = {"tokens": 0, "nats": 0.0, "early": 0.0, "early tokens": 0}, time.perf_counter()
    return {"text": options.text[0].name, "segment": SEGMENT, "parts": parts}


def resident() -> int:
    """Bytes of memory that the process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"train": train, "novel": novel}


def main() -> None:
    parser = argparse.ArgumentParser(description="The tools of this library on a trained decoder")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", required=True, help="a decoder of Transformers with its tokenizer")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="novels")
    parser.add_argument("--tokens", type=int, default=200_000, help="of each text (%(default)s)")
    parser.add_argument("--updates", type=int, default=160, help="of train (%(default)s)")
    parser.add_argument("--arm", choices=ARMS, default=ARMS[1], help="of novel (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("runs/trained_decoder"), help="of trained caches")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--result", type=Path, help="the JSON file that gets the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = mnemos.libraries.transformers()
    library.logging.disable_progress_bar()
    options.tokenizer = library.AutoTokenizer.from_pretrained(options.model)
    found = PARTS[options.part](options) | {"provenance": provenance(0, "cpu")}
    name = f"novel, {options.arm}" if options.part == "novel" else options.part
    print(json.dumps({name: found | {"provenance": "..."}}, indent=1)[:2000])
    if options.result:
        whole = json.loads(options.result.read_text()) if options.result.is_file() else {}
        options.result.write_text(json.dumps(whole | {name: found}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
