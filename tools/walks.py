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
LOADED = (
    "mnemos.Transformer(vocab_size=8, dim=8, layers=1, num_heads=2)",
    "mnemos.cache",
    "mnemos.ops.delta_rule",
    "mnemos.fast",
)


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


def main() -> None:
    """Print both tables."""
    model = mnemos.Transformer(vocab_size=64, dim=32, layers=2, num_heads=2, attention="linear").eval()
    ids = torch.randint(64, (2, 16))
    layer, segments = torch.nn.Linear(8, 8), torch.randn(4, 2, 8)

    def step(segment: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """One that visits none of this package's functions itself."""
        state = layer(segment if state is None else segment + state).tanh()
        return state.square().mean(), state

    transformers = mnemos.libraries.transformers()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
    # A model takes one cache, so there is one for each run.
    hosts = [transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **heads)) for _ in range(2)]
    walks = {
        "forward of a linear Transformer, two layers": torch.no_grad()(lambda: model(ids)),
        "replay of four segments": lambda: mnemos.replay(step, segments, module=layer),
        "cache of a Mistral, two layers": lambda: mnemos.cache(hosts.pop(), mnemos.GRC(scope="stream")),
    }
    print(f"{'walk':<45}{'hops':>8}{'functions':>12}{'calls':>8}")
    for name, walk in walks.items():
        walk()
        print(f"{name:<45}" + "{:>8,}{:>12,}{:>8,}".format(*count(walk)))
    print(f"\n{'name':<45}{'files':>8}")
    for line in LOADED:
        code = f"import sys, mnemos; {line}; print(sum(name.split('.')[0] == 'mnemos' for name in sys.modules))"
        loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        print(f"{line.partition('(')[0]:<45}{int(loaded):>8}")


if __name__ == "__main__":
    main()
