"""Read a whole novel with a trained decoder in constant memory, and print the perplexity as it goes.

    python examples/stream_novel.py FOLDER NOVEL.txt [--window 512] [--sinks 4] [--tokens 200000]

FOLDER is a decoder of Transformers with its tokenizer. `mnemos.linearise` with state="none" lets every layer attend to
the last tokens and the first ones alone, so the state stops growing; `mnemos.functional` makes the decoder a function
`logits, state = step(ids, state)`. Without --window the decoder is as it is, and the state grows with the novel.
A folder of a linearised decoder (RUN/model of `mnemos linearise`) is read as linearised: leave --window out.
"""

import argparse
import math
import time
from pathlib import Path

import torch

import mnemos
from mnemos.lab.hosted.hub import language_model
from mnemos.types import leaves

CHUNK = 512  # tokens that are read together


def main(arguments: list[str] | None = None) -> None:
    """Read the novel, and print a line for each part of it."""
    parser = argparse.ArgumentParser(description="Read a novel in constant memory")
    parser.add_argument("folder", help="a decoder of Transformers with its tokenizer, or hf:NAME of the hub")
    parser.add_argument("novel", type=Path, help="a text in UTF-8")
    parser.add_argument("--window", type=int, help="tokens that a layer attends to; without it, all")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that stay (%(default)s)")
    parser.add_argument("--tokens", type=int, help="read so many tokens (all)")
    parser.add_argument("--every", type=int, default=10_000, help="tokens between two lines (%(default)s)")
    options = parser.parse_args(arguments)
    model, tokenizer = language_model(options.folder)  # in eval mode; linearised, if it was saved so
    if options.window:
        print(mnemos.linearise(model, window=options.window, sinks=options.sinks, state="none"))
    step = mnemos.functional(model)
    text = options.novel.read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer(text, verbose=False)["input_ids"][: options.tokens]])

    state, nats, count, shown, start = None, 0.0, 0, 0, time.perf_counter()
    for first in range(0, ids.shape[1] - 1, CHUNK):
        chunk = ids[:, first : first + CHUNK + 1]
        with torch.no_grad():
            logits, state = step(chunk[:, :-1], state)
        nats += float(torch.nn.functional.cross_entropy(logits[0], chunk[0, 1:], reduction="sum"))
        count += chunk.shape[1] - 1
        if count - shown >= options.every or count == ids.shape[1] - 1:
            size = sum(x.numel() * x.element_size() for x in leaves(state)) / 2**20
            speed = (count - shown) / (time.perf_counter() - start)
            print(f"{count:,} tokens: perplexity {math.exp(nats / count):.2f} so far, {speed:,.0f} tokens/s, "
                  f"state {size:.1f} MiB", flush=True)  # fmt: skip
            shown, start = count, time.perf_counter()


if __name__ == "__main__":
    main()
