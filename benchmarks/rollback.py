"""Rejected drafts taken back by the operators, beside reading the accepted tokens again.

    python benchmarks/rollback.py --text FOLDER [--steps 150] [--rounds 5] [--models DIR] [--out FILE]

A Transformer with gated delta rules (4 layers of width 128) and a linear Transformer that drafts for it (2 layers) are
trained on the bytes of the text, a minute of a core together. One row and four rows at once are decoded with drafts, in
two ways that take turns: "operators", as `mnemos.speculate` goes back (`mnemos.ops.rewindable`), and "again", as it
does for other memories. Times are CPU seconds of the process in one thread, ratios the medians of those of each round.
Tokens at temperature 0 must be those of plain decoding, or the benchmark fails.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from speculative import PROMPT, SEGMENT, trained
from torch import Tensor

import mnemos
from mnemos.generate import rollback
from mnemos.lab.run.provenance import provenance
from mnemos.lab.tasks.files import read_bytes
from mnemos.lab.tasks.text_files import find_text

GOES_BACK = rollback.without_last
WAYS = {"operators": GOES_BACK, "again": lambda *_: None}


def decode(model: torch.nn.Module, draft: torch.nn.Module | None, prompt: Tensor, temperature: float) -> Any:
    """(seconds, what `speculate` found) of one text."""
    stream = mnemos.Stream(model).prefill(prompt)
    given = mnemos.Lookup(prompt) if draft is None else mnemos.Stream(draft).prefill(prompt)
    generator, start = torch.Generator().manual_seed(0), time.process_time()
    found = mnemos.speculate(stream, given, SEGMENT - PROMPT, temperature=temperature, generator=generator)
    return time.process_time() - start, found


def compared(
    name: str, model: torch.nn.Module, draft: torch.nn.Module | None, prompts: Tensor, temperature: float, rounds: int
) -> dict[str, Any]:
    """Both ways on the same rows of text."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    about: dict[str, Any] = {}
    for i in range(rounds + 1):
        for way in list(WAYS)[:: 1 if i % 2 else -1]:
            rollback.without_last = WAYS[way]
            spent, found = decode(model, draft, prompts, temperature)
            rollback.without_last = GOES_BACK
            if i:
                seconds[way].append(spent)
            about[way] = found
    if temperature == 0:
        start = time.process_time()
        plain = mnemos.Stream(model).prefill(prompts).generate(SEGMENT - PROMPT, temperature=0)[0]
        plain_seconds = time.process_time() - start
        if not all(torch.equal(found.tokens, plain) for found in about.values()):
            raise SystemExit(f"{name}: greedy tokens differ from plain decoding")
    row: dict[str, Any] = {
        "model": name,
        "draft": "look-up" if draft is None else "small model",
        "rows": len(prompts),
        "temperature": temperature,
        "acceptance": about["operators"].statistics.acceptance,
        "times faster": statistics.median(a / b for a, b in zip(seconds["again"], seconds["operators"], strict=True)),
    }
    if temperature == 0:
        row["plain"] = {"calls": SEGMENT - PROMPT, "tokens per second": plain.numel() / plain_seconds}
    for way, found in about.items():
        row[way] = {
            "calls": found.statistics.calls,
            "only to read again": found.statistics.again,
            "tokens per second": found.tokens.numel() / statistics.median(seconds[way]),
        }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a file of text, or a folder of them")
    parser.add_argument("--models", type=Path, help="the folder in which the trained models are kept")
    parser.add_argument("--steps", type=int, default=150, help="updates of each model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="results/rollback.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    content = b"".join(map(read_bytes, sorted(find_text(str(options.text)).read)))
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    kept = len(text) * 9 // 10
    names = "gated delta, 128 x 4", "draft"
    model, draft = (trained(name, text[:kept], options.models, options.steps) for name in names)
    prompts = torch.stack([text[p : p + PROMPT] for p in torch.linspace(kept, len(text) - SEGMENT, 4).long().tolist()])
    with torch.no_grad():
        found = [
            compared(names[0], model, small, prompts[:rows], temperature, options.rounds)
            for small, temperature in ((None, 0.0), (draft, 0.0), (draft, 1.0))
            for rows in (1, 4)
        ]
    if options.out:
        whole = {"steps": options.steps, "length": SEGMENT - PROMPT, "threads": 1, "decoding": found}
        options.out.write_text(json.dumps({**whole, "provenance": provenance(0, "cpu")}, indent=2) + "\n")


if __name__ == "__main__":
    main()
