"""States of Hugging Face Transformers' own models beside `mnemos.functional`: are they right, and what do they cost?

    python benchmarks/transformers_states.py [--only Mamba Llama] [--length 256] [--rounds 3]

Random weights, float32, one thread, two rows. Three differences from the forward of whole rows without a cache, divided
by the largest logit: tokens one at a time after half of the row, the second half at once, and a token after a prompt
that is padded on the right. Then the CPU milliseconds of reading the row, of eight single tokens, and of a forward and
backward of the row without a cache; medians of rounds that take turns.
"""

import argparse
import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mnemos
from mnemos.hugging_face.functional_model import check_model
from mnemos.libraries import transformers

_ALL = {"vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 1}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "head_dim": 32}
_DELTA = {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 32}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 16},
    "FalconMamba": {"state_size": 16},
    "Jamba": {**_HEADS, "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 8},
    "Mamba2": {"state_size": 32, "num_heads": 8, "head_dim": 32, "n_groups": 1, "chunk_size": 64},
    "Bamba": {**_HEADS, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 32, "mamba_chunk_size": 64},
    "Qwen3Next": {**_HEADS, **_DELTA, **_EXPERTS, "linear_value_head_dim": 32, "shared_expert_intermediate_size": 64},
    "Llama": _HEADS,
}


class Theirs:
    """The model with its own cache, called as `y, cache = step(x, cache)`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        takes = inspect.signature(model.forward).parameters
        self.name = check_model(model)[1]
        self.attends = not all(transformers().DynamicCache(config=model.config).is_linear)
        self.masks, self.positions = "attention_mask" in takes, "position_ids" in takes

    def __call__(
        self, x: Tensor, cache: Any, mask: Tensor | None = None, seen: Tensor | None = None
    ) -> tuple[Any, Any]:
        """mask [B, N + T]: of all tokens. seen [B]: the tokens before x."""
        options = {self.name: cache, "use_cache": True}
        if mask is not None and self.masks and (self.attends or mask.shape == x.shape):
            options["attention_mask"] = mask
        if self.positions and seen is not None:
            options["position_ids"] = seen[:, None] + torch.arange(x.shape[1])
        out = self.model(x, **options)
        return out.logits, out[self.name]


def differences(model: Any, step: Callable[..., Any], x: Tensor, own: bool) -> list[str]:
    """Of tokens one at a time, of half a row, and after right padding."""
    whole, half = model(x, use_cache=False).logits, x.shape[1] // 2
    scale, short = whole.abs().max(), half // 2

    def read(sizes: list[int]) -> Tensor:
        y, state, begin = [], None, 0
        for piece in x.split(sizes, 1):
            options = {"seen": torch.full((len(x),), begin)} if own else {}
            out, state = step(piece, state, **options)
            y.append(out)
            begin += piece.shape[1]
        return torch.cat(y, 1) - whole

    def padded() -> Tensor:
        lengths = torch.tensor([half, short])
        mask = torch.arange(half) < lengths[:, None]
        if own:
            _, state = step(x[:, :half], None, mask.long(), torch.zeros(2, dtype=torch.int64))
            mask = torch.cat([mask, mask[:, :1]], 1).long()
            y = step(x[:, half : half + 1], state, mask, lengths)[0]
        else:
            y = step(x[:, half : half + 1], step(x[:, :half], None, mask)[1])[0]
        alone = torch.cat([x[1:, :short], x[1:, half : half + 1]], 1)
        return y[1, 0] - model(alone, use_cache=False).logits[0, -1]

    found = []
    for attempt in (lambda: read([half] + [1] * half), lambda: read([half, half]), padded):
        try:
            found.append(f"{float(attempt().abs().max() / scale):.0e}")
        except RuntimeError:
            found.append("fails")
    return found


def milliseconds(work: Callable[[], Any]) -> float:
    """CPU time."""
    start = time.process_time()
    work()
    return 1e3 * (time.process_time() - start)


def main() -> None:
    """Print two lines per family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    library = transformers()
    library.logging.set_verbosity_error()
    for name in options.only:
        torch.manual_seed(0)
        sizes = {**_ALL, **MODELS[name]}
        model = getattr(library, f"{name}ForCausalLM")(getattr(library, f"{name}Config")(**sizes)).eval()
        steps = {"transformers": Theirs(model), "functional": mnemos.functional(model)}
        x = torch.randint(3, 500, (2, options.length))
        works: dict[str, list[Callable[[], Any]]] = {}
        for side, step in steps.items():
            with torch.no_grad():
                print(f"{name:15s}{side:13s}", *differences(model, step, x[:, :32], side == "transformers"), end="  ")
            works[side] = work(model, step, x)
            print()
        times: dict[str, list[list[float]]] = {side: [[], [], []] for side in steps}
        for _ in range(options.rounds):
            for i in range(3):
                for side in steps:
                    with torch.set_grad_enabled(i == 2):
                        times[side][i].append(milliseconds(works[side][i]))
        rows = (" ".join(f"{statistics.median(t):.0f}" for t in times[side]) for side in steps)
        print(f"{name:15s}ms: transformers {next(rows)}, functional {next(rows)}", flush=True)


def work(model: Any, step: Callable[..., Any], x: Tensor) -> list[Callable[[], Any]]:
    """What is timed: the row; eight single tokens of one row; forward and backward."""

    def singles() -> None:
        state = step(x[:1, :8], None)[1]
        for t in range(8, 16):
            _, state = step(x[:1, t : t + 1], state)

    def backward() -> None:
        y = model(x, use_cache=False).logits if isinstance(step, Theirs) else step(x)[0]
        y.float().square().mean().backward()
        model.zero_grad()

    return [lambda: step(x, None), singles, backward]


if __name__ == "__main__":
    main()
