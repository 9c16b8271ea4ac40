"""Whole models of Transformers and timm on a CPU, as they come and with `mnemos.fast`: training, prefill, decoding.

    python benchmarks/fast_models.py [--models Qwen3Next Mamba2 KimiLinear] [--width 64] [--tokens 1024] [--out FILE]
    python benchmarks/fast_models.py --models Mamba --parts prefill token --no-check        # 1,024 tokens
    python benchmarks/fast_models.py --models Mamba --parts training --tokens 160 --rounds 2
    python benchmarks/fast_models.py --models Mamba --parts training --alone                # 1,024 tokens
    python benchmarks/fast_models.py --models Llama Bert ViT
    python benchmarks/fast_models.py --models SmolLM2 --batch 1 --tokens 512

Random weights, float32, batch 2, 4 layers of width 512. Qwen3-Next: key heads 4 and value heads 8 of `--width`. Kimi
Linear: 8 heads of `--width`, with decays per channel. In both every fourth layer is an attention, and the MLPs are
dense, of width 1024. Mamba-2: 8 heads of `--width` in 4 groups, states of `--width`, no MLP. First, logits and
gradients must agree. Mamba: 1024 channels, states of 16 numbers a channel, no MLP. Transformers' training step of it
grows with the square of the tokens and more, to many minutes at 1,024: it is timed with fewer, or left out (`--alone`).
Llama: 8 heads of 64, 2 of keys, MLPs of 1408. Bert: 8 heads, MLPs of 2048, without dropout, a masked language model.
SmolLM2: the shape of SmolLM2-135M, 30 layers of width 576 and a vocabulary of 49,152. ViT: ViT-S/16 of timm, 8 pictures
of 224², a forward in place of the prefill. These four have dense layers and attentions alone.

A round times each model once, in an order that rotates. A training step: forward, loss and backward; with `--optimiser`
AdamW's step, fused, is in it. Decoding: 64 single tokens after 64 by model(token, cache), for batches of 1 and of
`--batch`.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from command import command, in_turns, merged, write
from torch import Tensor

import mnemos
from mnemos.lab.measure.timing import ratio, seconds_of
from mnemos.lab.run.provenance import provenance
from mnemos.libraries import transformers

VOCABULARY, DIM, LAYERS = 4096, 512, 4
COMMON = {"vocab_size": VOCABULARY, "hidden_size": DIM, "num_hidden_layers": LAYERS, "pad_token_id": 0}
TYPES = [*["linear_attention"] * (LAYERS - 1), "full_attention"]
BEFORE, STEPS = 64, 64  # tokens that are read before decoding is timed, and timed ones


def build(name: str, width: int) -> Any:
    """A new model of random weights."""
    heads = {"intermediate_size": 1024, "num_attention_heads": 8, "layer_types": TYPES}
    sizes: dict[str, dict[str, Any]] = {
        "Qwen3Next": heads
        | {"num_key_value_heads": 2, "head_dim": 64, "mlp_only_layers": list(range(LAYERS)), "num_experts": 2}
        | {f"linear_{key}_head_dim": width for key in ("key", "value")}
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_experts_per_tok": 1},
        "KimiLinear": heads
        | {"linear_num_heads": 8, "linear_head_dim": width, "kv_lora_rank": 64, "num_key_value_heads": 8}
        | {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64, "mlp_layer_types": ["dense"] * LAYERS}
        | {"bos_token_id": 1, "eos_token_id": 2},
        "Llama": {"intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2},
        "SmolLM2": {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536}
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
        "Bert": {"intermediate_size": 2048, "num_attention_heads": 8, "max_position_embeddings": 4096}
        | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "Mamba": {"state_size": 16},
        "Mamba2": {"num_heads": 8, "head_dim": width, "state_size": width, "n_groups": 4, "expand": width // 64},
    }
    torch.manual_seed(0)
    if name == "ViT":
        import timm

        return timm.create_model("vit_small_patch16_224")
    library, kind = transformers(), "Llama" if name == "SmolLM2" else name
    config = getattr(library, f"{kind}Config")(**COMMON | sizes[name])
    return getattr(library, f"{kind}ForMaskedLM" if name == "Bert" else f"{kind}ForCausalLM")(config)


def writes(model: Any) -> bool:
    """Whether a model writes tokens, from a cache."""
    return bool(getattr(getattr(model, "config", None), "use_cache", False)) and not getattr(model, "bert", None)


def train(model: Any, x: Tensor, optimiser: torch.optim.Optimizer | None = None) -> Tensor:
    model.train().zero_grad()
    if x.is_floating_point():
        logits = model(x)
        torch.nn.functional.cross_entropy(logits, torch.arange(len(x))).backward()
    else:
        out = model(x, labels=x, **({"use_cache": False} if writes(model) else {}))
        out.loss.backward()
        logits = out.logits
    if optimiser is not None:
        optimiser.step()
    kept: Tensor = logits.detach()
    return kept


@torch.no_grad()
def prefill(model: Any, x: Tensor) -> Any:
    return model.eval()(x, **({"use_cache": True, "logits_to_keep": 1} if writes(model) else {}))


@torch.no_grad()
def decode(model: Any, x: Tensor, steps: int = STEPS) -> tuple[float, Tensor]:
    """Seconds for a token, and the last logits."""
    out = model.eval()(x[:, :BEFORE], use_cache=True)
    name = next(key for key in ("cache", "past_key_values", "cache_params") if key in out)
    given = {name: out[name], "use_cache": True}
    for i in range(BEFORE, BEFORE + 4):
        model(x[:, i : i + 1], **given)
    start = time.perf_counter()
    for i in range(BEFORE + 4, BEFORE + 4 + steps):
        out = model(x[:, i : i + 1], **given)
    return (time.perf_counter() - start) / steps, out.logits


def check(plain: Any, fast: Any, x: Tensor) -> None:
    """Raise AssertionError unless logits, gradients and decoded tokens agree."""
    torch.testing.assert_close(train(fast, x), train(plain, x), rtol=1e-3, atol=1e-4)
    for (name, p), q in zip(plain.named_parameters(), fast.parameters(), strict=True):
        scale = float(p.grad.abs().max())
        torch.testing.assert_close(
            q.grad, p.grad, rtol=1e-2, atol=1e-3 * scale + 1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )
    if writes(plain):
        torch.testing.assert_close(decode(fast, x)[1], decode(plain, x)[1], rtol=1e-3, atol=1e-4)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    plain = build(name, options.width)
    fast = copy.deepcopy(plain)
    report = mnemos.fast(fast)
    random = torch.Generator().manual_seed(0)
    x = torch.randint(3, VOCABULARY, (options.batch, options.tokens), generator=random)
    if name == "ViT":
        x = torch.randn(8, 3, 224, 224, generator=random)
    if options.check and not options.alone:
        check(plain, fast, x[:2] if name == "ViT" else x[:, :256].contiguous())
    row: dict[str, Any] = {"model": name, "width": options.width, "tokens": options.tokens, "batch": options.batch}
    row["layers changed"] = len(report.changed)
    parts: dict[str, dict[str, Callable[[], float]]] = {}
    models = {"transformers": plain, "mnemos": fast}
    if options.alone:
        del models["transformers"]
    optimisers = {
        key: torch.optim.AdamW(model.parameters(), 1e-6, fused=True) if options.optimiser else None
        for key, model in models.items()
    }
    parts["training step"] = {
        key: lambda model=model, key=key: seconds_of(lambda: train(model, x, optimisers[key]))
        for key, model in models.items()
    }
    parts["prefill"] = {key: lambda model=model: seconds_of(lambda: prefill(model, x)) for key, model in models.items()}
    for rows in dict.fromkeys((1, options.batch)) if writes(plain) else ():
        tokens = x[:rows, : BEFORE + STEPS + 4]
        parts[f"token, batch {rows}"] = {
            key: lambda model=model, x=tokens: decode(model, x)[0] for key, model in models.items()
        }
    for part, runs in parts.items():
        if not any(part.startswith(wanted) for wanted in options.parts):
            continue
        times = in_turns(runs, options.rounds)
        found: dict[str, Any] = {"rounds": options.rounds}
        found["ms"] = {key: 1e3 * statistics.median(values) for key, values in times.items()}
        text = f"{name:10} {part:14} {found['ms']['mnemos']:8.2f} ms"
        if "transformers" in runs:
            found["times as fast"] = ratio(times, "transformers", "mnemos")._asdict()
            text += f", as it comes {found['ms']['transformers']:8.2f} ms"
            text += f"  {found['times as fast']['median']:.2f} times as fast"
        row[part] = found
        print(text, flush=True)
    return row


def main() -> None:
    sizes = {"width": 64, "tokens": 1024, "batch": 2, "rounds": 5, "threads": os.cpu_count() or 1}
    models, parts = ["Qwen3Next", "Mamba2", "KimiLinear"], ["training", "prefill", "token"]
    parser = command(__doc__, models=models, parts=parts, **sizes, optimiser=False)
    parser.add_argument("--no-check", dest="check", action="store_false")
    parser.add_argument("--alone", action="store_true", help="without the model as it comes and its comparison")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [measure(name, options) for name in options.models]
    about = provenance(0, "cpu")  # of each part: parts of several calls are in one row
    kept = {name: about[name] for name in ("commit", "dirty", "cpu", "command")}
    kept |= {"threads": options.threads, "optimiser": options.optimiser}
    for row in rows:
        row |= {part: row[part] | kept for part in options.parts if part in row}
    every = merged(options.out, rows, "model", "width", "tokens", "batch")
    write(options.out, {"rows": every, "threads": options.threads})


if __name__ == "__main__":
    main()
