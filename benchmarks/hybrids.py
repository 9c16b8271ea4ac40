"""Which attentions of a trained decoder need the past beyond a window, and what hybrids of them predict untrained.

    python benchmarks/hybrids.py rank --model FOLDER --text TEXT ... --out FILE [--pieces 1] [--length 2048]
    python benchmarks/hybrids.py heads --model FOLDER --text TEXT ... --ranking FILE --out FILE [--rows 20]
    python benchmarks/hybrids.py gates --model FOLDER --text TEXT ... --ranking FILE --out FILE [--steps 40]
    python benchmarks/hybrids.py sets --model FOLDER --text TEXT ... --ranking FILE --out FILE [--pieces 3]
    python benchmarks/hybrids.py head-sets --model FOLDER --text TEXT ... --ranking FILE --out FILE [--pieces 3]

`rank`: what the decoder loses for each attention that alone has a window of 64 tokens and 4 sinks; the order in which
`mnemos.rank_attentions` puts all of them into the window; and the mass of attention beyond window and sinks, a measure
of others. `heads` adds to it what is lost for each key head that alone has the window, and the nats of facts told 1,024
tokens ago in the first text, with each attention alone in the window. `sets`, on other texts: the loss with the first
2, 4, 8, 12 and 15 of that order whole and all others in the window, beside those that lose most alone, those with most
mass, some at equal distances, the last ones, and ten random draws. `gates` adds for each key head a share of whole
attention in place of the window's, which training lowers (DuoAttention, Xiao et al. 2024, arXiv 2410.10819; here by the
loss itself). `head-sets`: as `sets`, by key head, for as many keys and values as 2, 4, 8 and 12 attentions have.

Every loss is kept in OUT beside its set, so the same command goes on after a kill. Pieces are spaced evenly in a text.
"""

import math
from pathlib import Path
from typing import Any

import torch
from command import command
from linearised import load_decoder
from torch import Tensor
from torch.nn import functional as F

import mnemos
from mnemos.atomic import write_json
from mnemos.generators import generator
from mnemos.hosts.ranking import rank
from mnemos.lab.linearised.assess import recall
from mnemos.lab.linearised.ranked import KeptLoss
from mnemos.lab.linearised.text_batches import read_texts
from mnemos.lab.run.files import read_object
from mnemos.lab.run.provenance import now, provenance

WINDOW, SINKS, FIRST = 64, 4, 512
COUNTS, DRAWS = (2, 4, 8, 12, 15), 10
PRICE, RATE = 0.2, 0.04  # of the gates
_BLOCK = 512  # queries whose weights are held at a time


def far_mass(model: Any, pieces: list[Tensor]) -> dict[str, float]:
    """Of each attention the mean weight, over heads and queries from FIRST on, of keys beyond window and sinks."""
    library = mnemos.libraries.transformers()
    sums: dict[str, list[float]] = {name: [] for name, module in model.named_modules() if name.endswith("self_attn")}
    name_of = {module: name for name, module in model.named_modules() if name in sums}

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        t, groups = q.shape[2], q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        outputs, key = [], torch.arange(t)
        for begin in range(0, t, _BLOCK):
            query = torch.arange(begin, min(begin + _BLOCK, t))[:, None]
            scores = (q[:, :, begin : begin + _BLOCK] @ k.mT * scaling).masked_fill(key > query, -math.inf)
            weights = scores.softmax(-1)
            far = (key <= query - WINDOW) & (key >= SINKS)
            if begin >= FIRST:
                sums[name_of[module]].append(float((weights * far).sum(-1).mean()))
            outputs.append(weights @ v)
        return torch.cat(outputs, 2).transpose(1, 2), None

    library.AttentionInterface.register("far_mass", attend)
    before = model.config._attn_implementation
    model.set_attn_implementation("far_mass")
    with torch.no_grad():
        for ids in pieces:
            model(input_ids=ids[None], use_cache=False, logits_to_keep=1)
    model.set_attn_implementation(before)
    return {name: sum(some) / len(some) for name, some in sums.items()}


def told_without(model: Any, tokenizer: Any, text: Tensor, names: tuple[str, ...], rows: int, path: Path) -> Any:
    """Nats of answers about facts of 1,024 tokens ago, of the model and with each attention alone in the window."""
    kept: Any = read_object(path) if path.is_file() else {}
    for name in ("whole", *names):
        if name not in kept:
            if name != "whole":
                mnemos.linearise(model, WINDOW, SINKS, "none", where=name)
            one = recall(model, tokenizer, text, rows, (1024,))["distances"][0]
            kept[name] = {key: one[key] for key in ("nats", "choice", "own_words")}
            if name != "whole":
                mnemos.unlinearise(model)
            write_json(path, kept)
            print(f"told facts, {name} in the window: {sum(kept[name]['nats']) / rows:.3f} nats", flush=True)
    return kept


def train_gates(model: Any, pieces: list[Tensor], ranking: dict[str, Any], steps: int) -> dict[str, list[float]]:
    """The share of whole attention of each key head that minimises the loss plus PRICE times the mean share."""
    library = mnemos.libraries.transformers()
    names = {model.get_submodule(name): name for name in ranking["names"]}
    gates = {name: torch.ones(len(ranking["heads"][name]), requires_grad=True) for name in ranking["names"]}

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        t, groups = q.shape[2], q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        query, key = torch.arange(t)[:, None], torch.arange(t)
        near = (key <= query) & ((key > query - WINDOW) | (key < SINKS))
        whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        windowed = F.scaled_dot_product_attention(q, k, v, attn_mask=near, scale=scaling)
        share = gates[names[module]].repeat_interleave(groups)[:, None, None]
        return (share * whole + (1 - share) * windowed).transpose(1, 2), None

    library.AttentionInterface.register("gates", attend)
    model.set_attn_implementation("gates")
    model.requires_grad_(False).train().gradient_checkpointing_enable()  # it has no dropout
    optimiser = torch.optim.Adam(gates.values(), lr=RATE)
    for step in range(steps):
        ids = pieces[step * 13 % len(pieces)]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, FIRST - 1 : -1]
        loss = F.cross_entropy(logits, ids[FIRST:])
        share = torch.cat([*gates.values()]).mean()
        optimiser.zero_grad()
        (loss + PRICE * share).backward()
        optimiser.step()
        with torch.no_grad():
            for gate in gates.values():
                gate.clamp_(0, 1)
        if step % 5 == 0:
            print(f"{step} of {steps}: loss {float(loss):.3f}, mean share {float(share):.3f}", flush=True)
    return {name: gate.tolist() for name, gate in gates.items()}


def head_draws(count: int, ranking: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
    """Sets of whole key heads with as many keys and values as `count` attentions."""
    heads = {name: [*range(len(nats))] for name, nats in ranking["heads"].items()}
    sets = {"attentions jointly": {name: heads[name] for name in ranking["order"][:count]}}
    size = count * sum(map(len, heads.values())) // len(heads)
    for title, scores in (("heads alone", "heads"), ("heads by gates", "gates")):
        every = [(-score, name, i) for name, own in ranking[scores].items() for i, score in enumerate(own)]
        chosen: dict[str, list[int]] = {}
        for _, name, i in sorted(every)[:size]:
            chosen.setdefault(name, []).append(i)
        sets[title] = chosen
    return sets


def draws(names: tuple[str, ...], count: int, ranking: dict[str, Any]) -> dict[str, list[str]]:
    """The sets of `count` whole attentions that are compared."""
    by = lambda scores: sorted(names, key=lambda name: -scores[name])[:count]  # noqa: E731
    sets = {
        "jointly": ranking["order"][:count],
        "alone": by(ranking["alone"]),
        "mass": by(ranking["far_mass"]),
        "equal distances": [names[round((i + 0.5) * len(names) / count - 0.5)] for i in range(count)],
        "last": [*names[-count:]],
    }
    for draw in range(DRAWS):
        chosen = generator(draw, count).permutation(len(names))[:count]
        sets[f"random {draw}"] = [names[i] for i in chosen]
    return sets


def main() -> None:
    """Parse the arguments and do what they say."""
    sizes = {"pieces": 1, "length": 2048, "rows": 20, "steps": 40, "bfloat16": False, "threads": 1}
    parser = command(__doc__, model=Path, text=[Path], out=Path, **sizes)
    parser.add_argument("do", choices=("rank", "heads", "gates", "sets", "head-sets"))
    parser.add_argument("--ranking", type=Path, help="what `rank` wrote")
    options = parser.parse_args()
    if options.do != "rank" and options.ranking is None:
        parser.error(f"{options.do}: expected --ranking, the file that `rank` wrote, found none; add it")
    torch.set_num_threads(options.threads)
    model, tokenizer = load_decoder(options.model)
    pieces, every, length = [], [], options.length
    for text in read_texts(options.text).values():
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        whole = len(ids) // length
        pieces += [ids[length * (i * whole // options.pieces) :][:length] for i in range(options.pieces)]
        every.append(ids)
    same = {"model": options.model.name, "texts": [path.name for path in options.text]}
    same |= {name: getattr(options, name) for name in ("pieces", "length", "bfloat16")}
    started = provenance(0, "cpu") | same
    given = same, model, pieces, WINDOW, SINKS, FIRST
    options.out.parent.mkdir(parents=True, exist_ok=True)
    losses = options.out.with_suffix(".losses.json")
    torch.set_autocast_enabled("cpu", options.bfloat16)

    def write(found: Any, about: str = "about") -> None:
        write_json(options.out, found | {about: started | {"finished": now()}})

    if options.do == "rank":
        with KeptLoss(losses, *given) as loss:
            done = rank(loss, True, False, lambda n, of: n % 10 or print(f"{n} of {of}", flush=True))
        print(done, flush=True)
        ranking: Any = {name: getattr(done, name) for name in ("names", "alone", "order", "nats", "tokens")}
        write(ranking | {"far_mass": far_mass(model, pieces)})
        return

    ranking = read_object(options.ranking)
    names = tuple(ranking["names"])
    if options.do == "heads":
        with KeptLoss(losses, *given) as loss:
            whole, heads = loss(names), {}
            loss(names, keep=True)
            for name, count in loss.kv_heads.items():
                whole_heads = {one: {*range(n)} for one, n in loss.kv_heads.items()}
                without = [{**whole_heads, name: whole_heads[name] - {i}} for i in range(count)]
                heads[name] = [float((loss.with_heads(one) - whole).mean()) for one in without]
                print(name, *(f"{nats:.4f}" for nats in heads[name]), flush=True)
        told = told_without(model, tokenizer, every[0], names, options.rows, options.out.with_suffix(".told.json"))
        write(ranking | {"heads": heads, "told": told}, "about_heads")
        return

    if options.do == "gates":
        write(ranking | {"gates": train_gates(model, pieces, ranking, options.steps)}, "about_gates")
        return

    rows: list[Any] = []
    by_head = options.do == "head-sets"
    with KeptLoss(losses, *given) as loss:
        floor, ceiling = loss(()), loss(names)
        loss((), keep=True)
        for count in COUNTS[:4] if by_head else COUNTS:
            sets: Any = head_draws(count, ranking) if by_head else draws(names, count, ranking)
            for name, chosen in sets.items():
                nats = loss.with_heads(chosen) if by_head else loss(chosen)
                gained, gap = floor - nats, floor - ceiling
                parts = zip(gained.split(options.pieces), gap.split(options.pieces), strict=True)
                row = {"whole": count, "chosen": name, "names": chosen if by_head else sorted(chosen, key=names.index)}
                row |= {"nats": nats.tolist(), "gap_closed": float(gained.mean() / gap.mean())}
                rows.append(row | {"by_text": [float(a.sum() / b.sum()) for a, b in parts]})
                shares = ", ".join(f"{x:.0%}" for x in rows[-1]["by_text"])
                print(f"{count:3} whole, {name:16} {row['gap_closed']:5.0%} of the gap; {shares}", flush=True)
    write({"window": floor.tolist(), "whole": ceiling.tolist(), "rows": rows})


if __name__ == "__main__":
    main()
