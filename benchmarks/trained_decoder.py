"""A trained decoder with gated caches: gradients through a novel, training, and a novel read from end to end.

    python benchmarks/trained_decoder.py PART --model FOLDER [--text FILE ..] [--result results/trained_decoder.json]

FOLDER is a decoder of Transformers with its tokenizer, made for SmolLM2-135M-Instruct; texts are novels, plain or .gz.
Each part adds its figures to the JSON file under its own name:

    gradients     through many tokens of a novel: peak and time of `replay` beside other ways. The decoder has a gated
                  cache per stream and is read in segments; "layers" is the decoder itself, all tokens at once, whose
                  layers Transformers checkpoints
    train         gated caches per stream in the upper layers of the frozen decoder, by `replay` (resumes itself)
    novel         a novel in segments: the decoder alone, with the caches carried, and with them reset at each segment;
                  or with the last 64 tokens and 4 sinks in every layer, which needs no training; or the linearised
                  decoder of `mnemos linearise … --out RUN` (--linearised RUN/model)

--tokens: of each text; --updates: of train; --arm: of novel; --way and --frozen (of the caches alone): of gradients.
"""

import argparse
import functools
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from command import command
from torch import Tensor, nn
from torch.nn import functional as F

import mnemos
from mnemos.atomic import write_text
from mnemos.lab.hosted.decoder import HostedDecoderConfig
from mnemos.lab.hosted.hub import settings_of
from mnemos.lab.linearised.text_batches import read_texts
from mnemos.lab.measure.gradients import WAYS, state_bytes
from mnemos.lab.measure.peak import peak_of
from mnemos.lab.run.provenance import provenance
from mnemos.types import detach

SEGMENT, SEGMENTS, RATE = 256, 4, 1e-3  # tokens that the decoder reads together; segments of an update; learning rate
CACHED = (14, 17, 20, 23, 26, 29)  # layers with a cache; nothing below the first needs a gradient
CACHE = mnemos.GRC(scope="stream", length=16, block=64, gate_init=-4.0)
PART = 10_000  # tokens of a novel whose figures are added up


def tokens_of(options: argparse.Namespace, path: Path, count: int | None = None) -> Tensor:
    """The first tokens [T] of a novel with each paragraph in one line."""
    (text,) = read_texts([path]).values()
    paragraphs = (" ".join(one.split()) for one in text.split("\n\n"))
    return torch.tensor(options.tokenizer("\n\n".join(filter(None, paragraphs)))["input_ids"][:count])


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
    read = last * SEGMENT * SEGMENTS * len(rows)
    found = {"texts": [path.name for path in options.text], "updates": last, "tokens": read, "parameters": count}
    return found | {"seconds": seconds, "losses": [round(x, 4) for x in losses]}


ARMS = ("decoder alone", "caches carried", "caches reset", "window and sinks", "linearised")


def novel(options: argparse.Namespace) -> dict[str, Any]:
    """Read a novel in segments, in one way, and add up loss, time and memory for each PART tokens."""
    ids = tokens_of(options, options.text[0], options.tokens + 1)[None]
    model: Any
    if options.arm in ("window and sinks", "linearised"):
        kind = mnemos.libraries.transformers().AutoModelForCausalLM
        if options.arm == "linearised":
            decoder = mnemos.hosts.from_pretrained(kind, options.linearised, dtype=torch.float32).eval()
        else:
            decoder = kind.from_pretrained(options.model, dtype=torch.float32, trust_remote_code=False).eval()
            mnemos.linearise(decoder, window=options.window or 64, sinks=4, state="none")
        model = mnemos.functional(decoder)
    else:
        model = hosted(options, cached=options.arm.startswith("caches"))
    if options.arm.startswith("caches"):
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


def load(options: argparse.Namespace) -> Any:
    auto = mnemos.libraries.transformers().AutoModelForCausalLM
    return auto.from_pretrained(options.model, trust_remote_code=False).eval()


def gradients(options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory and seconds of the gradient through some tokens of a novel, in one way."""
    ids = tokens_of(options, options.text[0], options.tokens + 1)[None]
    if options.way.startswith("layers"):  # the decoder itself, whose layers Transformers checkpoints
        model = load(options)
        model.gradient_checkpointing_enable()
        model.train()
        run = functools.partial(_by_layers, model, ids, chunked=options.way != "layers")
    else:
        model = hosted(options, cached=True)
        segments = [ids[:, s : s + SEGMENT + 1] for s in range(0, options.tokens, SEGMENT)]
        run = functools.partial(WAYS[options.way], _Step(model), segments)
    if options.frozen:
        for name, weight in model.named_parameters():
            weight.requires_grad_(".grc." in name)
    began = time.perf_counter()
    peak = peak_of(run)
    seconds = time.perf_counter() - began
    norm = torch.stack([w.grad.norm() for w in model.parameters() if w.grad is not None]).norm()
    trained = sum(w.numel() for w in model.parameters() if w.requires_grad)
    return {"tokens": options.tokens, "peak": peak, "seconds": seconds, "norm": float(norm), "trained": trained}


class _Step(nn.Module):
    """A segment's loss and the state after it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, segment: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits, state = self.model(segment[:, :-1], state)
        return F.cross_entropy(logits.flatten(0, 1), segment[:, 1:].flatten()), state


def _by_layers(model: Any, ids: Tensor, chunked: bool) -> None:
    """A backward pass through all tokens at once. chunked: the logits of SEGMENT tokens at a time."""
    if not chunked:
        model(ids[:, :-1], labels=ids[:, 1:], shift_labels=ids[:, 1:], use_cache=False).loss.backward()
        return
    hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state[0]
    kept = hidden.detach().requires_grad_()
    for x, y in zip(kept.split(SEGMENT), ids[0, 1:].split(SEGMENT), strict=True):
        (F.cross_entropy(model.lm_head(x), y, reduction="sum") / len(kept)).backward()
    hidden.backward(kept.grad)


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "gradients": gradients,
    "train": train,
    "novel": novel,
}
GRADIENTS = ("through time", "torch.utils.checkpoint", "replay", "layers", "layers, loss in chunks")


def main() -> None:
    known = {"arm": ARMS, "way": GRADIENTS}
    sizes = {"tokens": 200_000, "updates": 160, "arm": ARMS[1], "way": "replay", "frozen": False, "threads": 1}
    parser = command(__doc__, known, model=str, folder=Path("runs/trained_decoder"), **sizes)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="novels")
    parser.add_argument("--window", type=int, default=0, help="of a novel (64)")
    parser.add_argument("--linearised", help="the folder of a linearised decoder, for a novel")
    parser.add_argument("--result", type=Path, help="the JSON file that gets the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = mnemos.libraries.transformers()
    library.logging.disable_progress_bar()
    options.tokenizer = library.AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    found = PARTS[options.part](options) | {"provenance": provenance(0, "cpu")}
    name = options.part
    name += f", {options.arm}" if name == "novel" else ""
    if name == "gradients":
        name += f", {options.way}, {options.tokens}" + (", frozen" if options.frozen else "")
    print(json.dumps({name: found | {"provenance": "..."}}, indent=1)[:2000])
    if options.result:
        whole = json.loads(options.result.read_text()) if options.result.is_file() else {}
        write_text(options.result, json.dumps(whole | {name: found}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
