"""A trained decoder as it comes and linearised: tokens a second while generating and reading, and bytes of state.

    python benchmarks/linearised.py generate --model FOLDER [--context 2000 8000 32000] [--threads 2] [--llama-cpp]
                                             [--out FILE]
    python benchmarks/linearised.py prefill  --model FOLDER [--context 2000 8000 32000] [--threads 2] [--out FILE]

FOLDER is a decoder of Transformers; only its configuration is read, and weights are random (`--weights` reads them
too), in float32, batch 1. First, a linearised model of the same kind must give equal logits in a call, in single tokens
and, within the window, to the model.

generate: the model's own `generate`, greedy, after CONTEXT tokens, with transformers' DynamicCache. A round generates
`--steps` tokens with each model, in an order that rotates. The cache of the softmax model holds random keys and values,
which take the same time; after a round the new ones are removed. The linearised model's cache has read 1,024 tokens:
after the window it is the same at any length. With --llama-cpp a Llama is also run by llama.cpp (llama-cpp-python, and
gguf for the weights' file), built for this processor: weights in float32, keys and values in float16.
prefill: logits of the last token after CONTEXT tokens, softmax in one call as `generate` reads a prompt, linearised in
calls of 2,048 tokens. At 32,000 tokens one call takes minutes.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from command import command, in_turns, merged
from torch import Tensor

import mnemos
from mnemos.atomic import write_text
from mnemos.hosts.linearised_cache import LinearisedLayer
from mnemos.lab.measure.timing import ratio
from mnemos.lab.run.provenance import provenance
from mnemos.libraries import cache_name, transformers

PIECE, BEFORE = 2048, 1024  # tokens of a call of the linearised model; tokens that it has read before it generates
SMALL = 4  # layers of the models that must agree


def state_bytes(cache: Any) -> int:
    """Bytes of the tensors that a cache of Transformers holds, each storage once."""
    seen: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, list | tuple):
            for one in value:
                walk(one)
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif hasattr(value, "__dict__"):
            walk(list(vars(value).values()))

    walk(cache.layers)
    return sum(seen.values())


def load_decoder(folder: Path) -> tuple[Any, Any]:
    """The decoder of a folder and its tokenizer."""
    library = transformers()
    model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return model.eval(), library.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def random_decoder(folder: Path, layers: int | None = None) -> Any:
    """A decoder like that of a folder, or so many layers of it, with random weights, each time the same."""
    torch.manual_seed(0)
    library = transformers()
    config = library.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.num_hidden_layers = layers or config.num_hidden_layers
    return library.AutoModelForCausalLM.from_config(config, trust_remote_code=False).float().eval()


def ranked(path: Path, count: int, heads: bool) -> list[str]:
    """The attentions that a file of `hybrids.py` puts first; or the key heads with the largest trained shares."""
    if not count:
        return []
    ranking = json.loads(path.read_text())
    if not heads:
        return ranking["order"][:count]
    shares = {f"{name}:{i}": share for name, some in ranking["gates"].items() for i, share in enumerate(some)}
    return sorted(shares, key=shares.__getitem__, reverse=True)[:count]


def linearise(model: Any, options: argparse.Namespace, state: str) -> None:
    """Give the model a state, with a weight that is large enough to count."""
    kind: Any = state
    names = {name for name, _ in model.named_modules()}  # a small model has the first attentions alone
    full = [one for one in ranked(options.ranking, options.full, options.heads) if one.partition(":")[0] in names]
    report = mnemos.linearise(
        model, options.window, options.sinks, kind, rank=options.rank, rotary=options.rotary, full=full or None
    )
    with torch.no_grad():
        for name, parameter in report.maps.items():
            if name.endswith("log_gamma"):
                parameter.fill_(-4.0)


def read(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """The logits of the last token, read in pieces."""
    for piece in ids.split(PIECE, 1):
        logits: Tensor = model(piece, logits_to_keep=1, **{cache_name(): cache}).logits
    return logits


def check(options: argparse.Namespace, state: str) -> None:
    """A small linearised model gives equal logits in all ways of reading."""
    plain, model = (random_decoder(options.model, SMALL) for _ in range(2))
    linearise(model, options, state)
    ids = torch.randint(100, (1, options.window + options.sinks + 90))
    cache = transformers().DynamicCache()
    whole = model(ids).logits
    steps = [model(ids[:, t : t + 1], **{cache_name(): cache}).logits for t in range(ids.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)
    assert torch.equal(model(ids[:, : options.window]).logits, plain(ids[:, : options.window]).logits)


def filled(model: Any, n: int) -> Any:
    """A DynamicCache with random keys and values of n tokens."""
    config, cache = model.config, transformers().DynamicCache()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn(2, 1, config.num_key_value_heads, n, width), layer)
    return cache


def stretch(model: Any, cache: Any, n: int) -> None:
    """Let the whole attentions of a hybrid have n tokens: random keys and values of them, or the first n."""
    config = model.config
    for layer in cache.layers:
        if isinstance(layer, LinearisedLayer):
            layer.columns = n
        if layer.keys is None:
            continue
        heads, kept = layer.keys.shape[1:3]
        more = torch.randn(2, 1, heads, max(0, n - kept), config.head_dim)
        layer.keys, layer.values = (
            torch.cat([x[:, :, :n], y], 2) for x, y in zip((layer.keys, layer.values), more, strict=True)
        )


def in_llama_cpp(model: Any, n: int, options: argparse.Namespace) -> tuple[Callable[[], None], int]:
    """A Llama in llama.cpp that has read n tokens: what generates more and forgets them, and its cache's bytes."""
    import gguf
    import llama_cpp

    config = model.config
    with tempfile.TemporaryDirectory() as folder:
        file = gguf.GGUFWriter(path := f"{folder}/model.gguf", "llama")
        file.add_tokenizer_model("none")
        file.add_vocab_size(config.vocab_size)
        file.add_context_length(config.max_position_embeddings)
        file.add_embedding_length(config.hidden_size)
        file.add_block_count(config.num_hidden_layers)
        file.add_feed_forward_length(config.intermediate_size)
        file.add_head_count(config.num_attention_heads)
        file.add_head_count_kv(config.num_key_value_heads)
        file.add_layer_norm_rms_eps(config.rms_norm_eps)
        file.add_rope_freq_base(config.rope_parameters["rope_theta"])
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        for name, x in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):  # pairs that turn together are neighbours
                x = x.view(-1, 2, config.head_dim // 2, x.shape[1]).transpose(1, 2).reshape(x.shape)
            file.add_tensor(names.get_name(name, (".weight",)), x.detach().contiguous().numpy())
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
        file.close()
        threads = {"n_threads": options.threads, "n_threads_batch": options.threads}
        llama = llama_cpp.Llama(path, n_ctx=n + options.steps, use_mmap=False, verbose=False, **threads)

    def read(ids: list[int]) -> Tensor:
        llama.eval(ids)
        return torch.tensor(llama._ctx.get_logits()[: config.vocab_size])

    def generate() -> None:
        llama.n_tokens = n
        token = 1
        for _ in range(options.steps):
            token = int(read([token]).argmax())

    ids = torch.randint(100, (1, n))
    torch.testing.assert_close(read(ids[0, :64].tolist()), model(ids[:, :64]).logits[0, -1], rtol=0, atol=2e-2)
    read(ids[0, 64:].tolist())
    return generate, 2 * 2 * n * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def generate(models: dict[str, Any], n: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens a second while generating, of each model, and the bytes of its cache."""
    caches: dict[str, Any] = {}
    places: dict[str, int] = {}
    for name, model in models.items():
        if name == "softmax":
            caches[name] = filled(model, n)
        else:
            caches[name] = transformers().DynamicCache(config=model.config)
            read(model, torch.randint(100, (1, BEFORE)), caches[name])
            if options.full:
                stretch(model, caches[name], n)
        places[name] = caches[name].get_seq_length()

    sizes = {name: state_bytes(cache) for name, cache in caches.items()}
    if options.llama_cpp:
        of_llama_cpp, sizes["llama.cpp"] = in_llama_cpp(models["softmax"], n, options)

    def run(name: str) -> float:
        """Seconds a token."""
        if name == "llama.cpp":
            began = time.perf_counter()
            of_llama_cpp()
            return (time.perf_counter() - began) / options.steps
        cache, steps = caches[name], options.steps
        ids = torch.ones(1, places[name] + 1, dtype=torch.long)
        began = time.perf_counter()
        lengths = {"max_new_tokens": steps, "min_new_tokens": steps, "attention_mask": torch.ones_like(ids)}
        made = models[name].generate(ids, do_sample=False, **lengths, **{cache_name(): cache})
        seconds = (time.perf_counter() - began) / steps
        assert made.shape[1] == ids.shape[1] + steps
        if name == "softmax":
            cache.crop(-steps)
        elif options.full:
            stretch(models[name], cache, n)
        else:
            places[name] = cache.get_seq_length()
        return seconds

    times = in_turns({name: partial(run, name) for name in sizes}, options.rounds)
    sizes |= {name: state_bytes(cache) for name, cache in caches.items()}
    return rows(times, n, options, sizes)


def prefill(models: dict[str, Any], n: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens a second while reading n tokens."""
    ids, sizes = torch.randint(100, (1, n)), {}

    def run(name: str) -> float:
        model, cache = models[name], transformers().DynamicCache(config=models[name].config)
        began = time.perf_counter()
        if name == "softmax":
            model(ids, logits_to_keep=1, **{cache_name(): cache})
        else:
            read(model, ids, cache)
        seconds = (time.perf_counter() - began) / n
        sizes[name] = state_bytes(cache)
        return seconds

    return rows(in_turns({name: partial(run, name) for name in models}, options.rounds, first=0), n, options, sizes)


def rows(
    times: dict[str, list[float]], n: int, options: argparse.Namespace, sizes: dict[str, int]
) -> list[dict[str, Any]]:
    found = []
    for name, seconds in times.items():
        changed = name in options.states
        row: dict[str, Any] = {key: getattr(options, key) for key in ("part", "rank", "rotary")}
        row |= {"model": name, "full": options.full * changed, "context": n, "state_bytes": sizes[name]}
        row |= {"tokens_per_second": 1 / statistics.median(seconds), "rounds": len(seconds)}
        if changed and options.heads:
            row["heads"] = True
        if name != "softmax":
            row["times_softmax"] = ratio(times, "softmax", name)._asdict()
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


@torch.no_grad()
def main() -> None:
    sizes = {"window": 64, "sinks": 4, "rank": 0, "rounds": 5, "threads": os.cpu_count() or 1}
    parser = command(__doc__, model=Path, context=[2000, 8000, 32000], states=["delta"], **sizes)
    parser.add_argument("part", choices=["generate", "prefill"])
    parser.add_argument("--weights", action="store_true")
    parser.add_argument("--rotary", action="store_true", help="features after rotary positions")
    parser.add_argument("--full", type=int, default=0, help="attentions that stay whole, the first of --ranking")
    parser.add_argument("--heads", action="store_true", help="key heads in place of attentions")
    parser.add_argument("--ranking", type=Path, default=Path("results/attention_ranking.json"))
    parser.add_argument("--steps", type=int, default=16, help="tokens that a round generates")
    parser.add_argument("--llama-cpp", action="store_true", help="generate by llama.cpp too")
    options = parser.parse_args()
    if options.llama_cpp and options.part != "generate":
        parser.error("--llama-cpp goes with generate")
    torch.set_num_threads(options.threads)
    load = (lambda folder: load_decoder(folder)[0]) if options.weights else random_decoder
    models = {name: load(options.model) for name in ("softmax", *options.states)}
    for state in options.states:
        check(options, state)
        linearise(models[state], options, state)
    measure = generate if options.part == "generate" else prefill
    measured = [row for n in options.context for row in measure(models, n, options)]
    if options.out:
        about = provenance(0, "cpu")
        kept = {name: about[name] for name in ("commit", "dirty", "cpu", "command", "started")}
        keys = "part", "model", "rank", "rotary", "full", "heads", "context"
        every = merged(options.out, (row | kept for row in measured), *keys)
        settings = {name: getattr(options, name) for name in ("window", "sinks", "steps", "threads", "weights")}
        found = {"rows": every, **settings, "decoder": options.model.name}
        write_text(options.out, json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
