"""How far a call walks through this library, and how many of its files a name loads: `python tools/walks.py`.

A walk is counted by `sys.setprofile` over the frames of the package's own files. Hops: calls into another file than the
caller's. Functions: different ones that were entered. Calls: all of them. Each walk runs once beforehand, so that what
is made ready once is not counted.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import mnemos

SOURCE = str(Path(mnemos.__file__).parent)
LOADED = {
    "mnemos.Transformer": "mnemos.Transformer(vocab_size=8, dim=8, layers=1, num_heads=2)",
    "mnemos.cache": "mnemos.cache",
    "mnemos.ops.delta_rule": "mnemos.ops.delta_rule",
    "mnemos.fast": "mnemos.fast",
}


def count(walk: Callable[[], object]) -> tuple[int, int, int]:
    """Hops, functions and calls of one run."""
    hops, calls, functions = 0, 0, set()
    files: list[str] = []  # of the frames of this package that are open, innermost last

    def see(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal hops, calls
        file = frame.f_code.co_filename
        if not file.startswith(SOURCE):
            return
        if event == "call":
            calls += 1
            hops += bool(files) and files[-1] != file
            functions.add(frame.f_code)
            files.append(file)
        elif event == "return" and files:
            files.pop()

    sys.setprofile(see)
    try:
        walk()
    finally:
        sys.setprofile(None)
    return hops, len(functions), calls


def walk_transformer() -> Callable[[], object]:
    """Of a linear transformer, without gradients."""
    model = mnemos.Transformer(vocab_size=64, dim=32, layers=2, num_heads=2, attention="linear").eval()
    ids = torch.randint(64, (2, 16))
    return torch.no_grad()(lambda: model(ids))


def walk_replay() -> Callable[[], object]:
    """Of a step that visits none of this package's functions itself."""
    layer = torch.nn.Linear(8, 8)

    def step(segment: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        state = layer(segment if state is None else segment + state).tanh()
        return state.square().mean(), state

    segments = torch.randn(4, 2, 8)
    return lambda: mnemos.replay(step, segments, module=layer)


def walk_cache() -> Callable[[], object]:
    """Of a decoder with a sliding window; a model takes one cache, so there is one for each run."""
    transformers = mnemos.libraries.transformers()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
    models = [transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **heads)) for _ in range(2)]
    return lambda: mnemos.cache(models.pop(), mnemos.GRC(scope="stream"))


def main() -> None:
    """Print both tables."""
    walks = {
        "forward of a Transformer, two layers": walk_transformer(),
        "replay of four segments": walk_replay(),
        "cache of a Mistral, two layers": walk_cache(),
    }
    print(f"{'walk':<40}{'hops':>8}{'functions':>12}{'calls':>8}")
    for name, walk in walks.items():
        walk()
        print(f"{name:<40}" + "{:>8,}{:>12,}{:>8,}".format(*count(walk)))
    print(f"\n{'name':<40}{'files':>8}")
    for name, line in LOADED.items():
        code = f"import sys, mnemos; {line}; print(sum(name.split('.')[0] == 'mnemos' for name in sys.modules))"
        loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        print(f"{name:<40}{int(loaded):>8}")


if __name__ == "__main__":
    main()
