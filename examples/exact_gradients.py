"""Exact gradients through 16,384 tokens of a novel, at the memory of one segment, with `mnemos.replay`.

    python examples/exact_gradients.py FOLDER NOVEL.txt [--tokens 16384] [--segment 512] [--window 512]

FOLDER is a decoder of Transformers with its tokenizer. Every layer attends to the last --window tokens and 4 sinks, so
that the state between two segments has a constant size. Gradient flows through that state: with 30 layers, a loss
depends on tokens 30 windows back. `replay` keeps the states alone and runs each segment again in its backward pass;
the gradients are those of back-propagation through all tokens at once. An optimiser's step would follow.
A folder of a linearised decoder (RUN/model of `mnemos linearise`) is read as linearised: give --window 0.
"""

import argparse
import resource
import time
from pathlib import Path

import torch

import mnemos
from mnemos.lab.hosted.hub import language_model


def main(arguments: list[str] | None = None) -> None:
    """Compute the gradients, and print what they cost."""
    parser = argparse.ArgumentParser(description="Exact gradients through a long text")
    parser.add_argument("folder", help="a decoder of Transformers with its tokenizer, or hf:NAME of the hub")
    parser.add_argument("novel", type=Path, help="a text in UTF-8")
    parser.add_argument("--tokens", type=int, default=16_384, help="of the novel (%(default)s)")
    parser.add_argument("--segment", type=int, default=512, help="tokens whose activations are kept (%(default)s)")
    about = "tokens that a layer attends to; 0: FOLDER is linearised already (%(default)s)"
    parser.add_argument("--window", type=int, default=512, help=about)
    options = parser.parse_args(arguments)
    model, tokenizer = language_model(options.folder)  # in eval mode: no dropout
    if options.window:
        mnemos.linearise(model, window=options.window, sinks=4, state="none")
    read = mnemos.functional(model)

    def step(segment: torch.Tensor, state: object) -> tuple[torch.Tensor, object]:
        logits, state = read(segment[:, :-1], state)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), segment[:, 1:].flatten()), state

    text = options.novel.read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer(text, verbose=False)["input_ids"][: options.tokens + 1]])
    starts = range(0, ids.shape[1] - 1, options.segment)
    segments = [ids[:, start : start + options.segment + 1] for start in starts]
    began = time.perf_counter()
    found = mnemos.replay(step, segments, module=model)
    seconds = time.perf_counter() - began
    norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{ids.shape[1] - 1:,} tokens in {len(segments)} segments: loss {found.loss.item():.4f}, norm of the "
          f"gradient {norm:.4f}, {seconds:.0f} s, peak of the process {peak:.2f} GiB")  # fmt: skip


if __name__ == "__main__":
    main()
