"""Write the tables of the pages that are made whole from results/*.json: `python tools/page_tables.py [--check]`.

A table stands between `<!--table NAME-->` and `<!--/table-->`. `--check` writes nothing; it fails where a page has
other lines than its table, and prints both.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mnemos.lab.compare.significance import Spread, correct, interval, spread, welch
from mnemos.lab.papers.verdicts import verdicts

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"<!--table (\S+)-->\n(.*?)<!--/table-->", re.DOTALL)
KIB = 2.0**10
_FUSED = "com.microsoft.GatedDeltaNet", "com.microsoft.LinearAttention"
Value = Any  # what JSON holds
_PAPERS = (
    ("cached_transformers", "cached-transformers", "Cached Transformers"),
    ("linear_transformers", "linear-transformers", "Transformers are RNNs"),
    ("memformer", "memformer-paper", "Memformer"),
)


def what_helped() -> str:
    """The table of docs/memories.md: a gated cache beside its baselines, mean and spread over the seeds."""
    rows = []
    for title, stem, file in (
        ("MNIST, ViT", "mnist-vit", "mnist_vit"),
        ("digits 8 × 8, ViT", "digits-vit", "digits_vit"),
        ("540 photos, ViT", "photos-vit", "photos_vit"),
        ("short ListOps", "demo", "demo_unwritten"),
    ):
        found = {row["name"]: row for row in _load(file)["rows"]}
        arms = {end: found[f"{stem}{end}"] for end in ("", "-wider", "-cached")}
        control = found[f"{stem}-cached-unwritten"]
        rows.append((title, *arms.values(), control))
    (recall,) = (entry for entry in _load("bench_memory")["benchmarks"] if entry["name"] == "mqar")
    window, cached, control = _cache_per_stream(recall)
    rows.append(("MQAR (recall of pairs), cache per stream", window, None, cached, control))
    return _beside_controls("test accuracy", rows, ".3f")


def other_tasks() -> str:
    """The table of docs/memories.md: small forms of the tables of Cached Transformers on other tasks."""
    shapes, multi30k = ({row["name"]: row for row in _load(f)["rows"]} for f in ("shapes_arms", "multi30k_demo"))
    stem = "shapes-mask-rcnn"
    rows = [("shapes, Mask R-CNN, default preset: box AP", *(shapes[f"{stem}{end}"] for end in _ENDS))]
    rows.append(("Multi30k, default preset: BLEU", *(multi30k[f"multi30k-demo{end}"] for end in _ENDS)))
    cached, constant = _load("multi30k_paper")["rows"]
    rows.append(("Multi30k, `paper`: BLEU", None, None, cached, constant))
    mnist = {row["name"]: _in_percent(row) for row in _load("mnist_vit")["rows"]}
    arms = (mnist[f"mnist-vit{end}"] for end in ("", "-wider", "-paper", "-paper-constant"))
    rows.append(("MNIST, ViT, `paper`: accuracy, %", *arms))
    for name, entry in _load("listops_128")["comparisons"].items():
        plain, cached, control, wider = map(_in_percent, entry["rows"])
        rows.append((f"ListOps of 64 to 128 symbols, {name}, `paper`: accuracy, %", plain, wider, cached, control))
    return _beside_controls("score", rows, ".1f", seeds=3)


def _in_percent(row: Value) -> Value:
    return {**row, "mean": 100 * row["mean"], "std": 100 * row["std"]}


def small_images() -> str:
    """The table of the page of Cached Transformers: Tables 1 and 2 in a small form, each cache beside its baseline."""
    lines = [
        "| small host, on digits | accuracy, % | minus none (95 %), points | p | never written "
        "| minus never written (95 %) | p |\n"
    ]
    lines.append("|---|" + "---|" * 6 + "\n")
    first, second = (_load(name)["tables"] for name in ("cached_table1", "cached_table2"))
    accuracies = {row[""]: row for row in first[1]["rows"]}
    keys = {row[""]: row for row in second[1]["rows"]}
    gains = {row[""]: row for row in second[2]["rows"]} | {row[""]: row for row in first[2]["rows"]}
    for host, row in accuracies.items():
        lines.append(f"| {_HOSTS[host]}, none | {row['none']} | | | | | |\n")
        for ending, kind in _KINDS.items():
            if (gain := gains.get(host + ending)) is None:
                continue
            control = "" if gain["control"] is None else f"{row[gain['control']]}"
            own = gain["to its control"] or ""
            cells = [
                (keys if kind not in row else accuracies)[host][kind],
                gain["to none"],
                _p(gain["p, none"]),
                control,
                own,
            ]
            lines.append(f"| {_HOSTS[host]}, {kind} | " + " | ".join([*cells, _p(gain["p, control"])]) + " |\n")
    return "".join(lines)


_HOSTS = {"digits-vit": "ViT", "digits-pvt": "PVT v2", "digits-swin": "Swin"}
_KINDS = {
    "-attention-cache": "attention-based",
    "-paper": "GRC, paper",
    "-paper-rows": "GRC, paper, per row",
    "-cached": "GRC, mnemos",
}


def _p(found: float | None) -> str:
    return "" if found is None else f"{found:.2f}" if found >= 0.005 else "< 0.01"


_ENDS = ("", "-cached-wider", "-cached", "-cached-unwritten")  # of rows, in the order of the columns


def stream_caches() -> str:
    """The table of docs/memories.md: what a written cache per stream adds, in every default benchmark."""
    rows = []
    for entry in _load("bench_memory")["benchmarks"]:
        window, cached, control = _cache_per_stream(entry)
        rows.append((f"`{entry['name']}`", window, None, cached, control))
    return _beside_controls("test accuracy, cache per stream", rows, ".3f", seeds=3)


def _cache_per_stream(entry: Value) -> list[Value]:
    """The rows of a benchmark: no cache, cached, never written."""
    return [_row(entry, name) for name in ("window", "gated-cache", "gated-cache-unwritten")]


def _beside_controls(score: str, rows: list[tuple[str, Value, Value, Value, Value]], form: str, seeds: int = 5) -> str:
    """A table of rows (title, no cache, equal parameters, cached, never written); p is corrected over its rows (Holm).

    Cells have the number of their seeds in brackets unless it is `seeds`. A column that has no values is left out.
    """
    shown = [i for i in range(4) if any(arms[i] is not None for _, *arms in rows)]
    names = [score, *(("no cache", "equal parameters", "cached", "never written")[i] for i in shown)]
    names += ["cached − never written (95 %)", "p"]
    lines = [f"| {' | '.join(names)} |\n", "|" + "---|" * len(names) + "\n"]
    spreads = [[Spread(arm["mean"], arm["std"], arm["seeds"]) for arm in arms[2:]] for _, *arms in rows]
    for (title, *arms), gain in zip(rows, correct([welch(*both) for both in spreads]), strict=True):
        cells = [_spread(arms[i], form, seeds) for i in shown]
        assert gain.interval is not None, f"{title}: expected two seeds or more"
        ends = (float(f"{x:{form}}") + 0.0 for x in (gain.difference, *gain.interval))  # no −0.0
        cells.append("{} ({} to {})".format(*(f"{x:+{form}}".replace("-", "−") for x in ends)))
        cells.append(_p(gain.p_holm))
        lines.append(f"| {title} | " + " | ".join(cells) + " |\n")
    return "".join(lines)


def _spread(row: Value, form: str, seeds: int) -> str:
    if row is None:
        return "not run"
    count = "" if row["seeds"] == seeds else f" ({row['seeds']})"
    return f"{row['mean']:{form}} ± {row['std']:{form}}{count}"


def which_memory() -> str:
    """The table of docs/memories.md: every memory's scores, and its state and seconds in the first benchmark."""
    benchmarks = _load("bench_memory")["benchmarks"]
    names = list(dict.fromkeys(row["name"] for entry in benchmarks for row in entry["rows"]))
    rows = {name: [_row(entry, name) for entry in benchmarks] for name in names}
    first = benchmarks[0]["name"]
    lines = [
        "| memory | "
        + " | ".join(f"`{entry['name']}`" for entry in benchmarks)
        + f" | state, KiB, in `{first}` | seconds |\n",
        "|---|" + "---|" * (len(benchmarks) + 2) + "\n",
    ]
    best = [_best(entry["rows"]) for entry in benchmarks]
    for name, found in rows.items():
        cells = ["failed" if row is None else _score(row, name in top) for row, top in zip(found, best, strict=True)]
        state = "" if found[0] is None else f"{found[0]['state_bytes'] / KIB:.1f}"
        seconds = "" if found[0] is None else f"{found[0]['seconds']:.0f}"
        lines.append(f"| {name} | " + " | ".join([*cells, state, seconds]) + " |\n")
    guess = [f"{entry['chance']:.2f}" for entry in benchmarks]
    lines.append("| a guess | " + " | ".join([*guess, "", ""]) + " |\n")
    return "".join(lines)


def which_forgets() -> str:
    """The table of docs/memories.md: linear attention, softmax attention and the layers that forget and correct."""
    earlier = {entry["name"]: entry for entry in _load("bench_memory")["benchmarks"]}
    recall, rewritten, pairs = (
        {entry["name"]: entry for entry in _load("memories_that_forget")["benchmarks"]}[name]
        for name in ("mqar", "mqar-rewritten", "mqar-two-tokens")
    )
    lines = [
        "| memory | state, KiB | `mqar` | in 512 tokens | `mqar-rewritten` | rewritten keys | their old values "
        "| `mqar-two-tokens` |\n",
        "|---|---|---|---|---|---|---|---|\n",
    ]
    rows = {row["name"]: row for row in (*earlier["mqar"]["rows"], *recall["rows"])}
    for again in sorted(rewritten["rows"], key=lambda row: -rows[row["name"]]["mean"]):
        row = rows[again["name"]]
        cells = [f"{row['state_bytes'] / KIB:.1f}", _spread(row, ".3f", 3), f"{row['beyond'][-1]['mean']:.2f}"]
        scores = again, *again["beside"].values(), _row(pairs, row["name"])
        cells += [_spread(one and {"seeds": 3, **one}, ".3f", 3) for one in scores]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |\n")
    return "".join(lines)


def text_state(file: str = "text_state") -> str:
    """The tables of docs/memories.md: memories of one size on books, the best first."""
    lines = ["| memory | bits per byte | minus Transformer-XL | updates | state, KiB |\n", "|---|---|---|---|---|\n"]
    for row in sorted(_load(file)["rows"], key=lambda row: row["mean"]):
        against = row["against"]
        gain = ""
        if against is not None:
            ends = (against["difference"], *against["interval"])
            gain = "{} ({} to {})".format(*(f"{x:+.3f}".replace("-", "−") for x in ends))
        cells = [row["name"].removeprefix("text-state-"), f"{row['mean']:.3f} ± {row['std']:.3f}", gain]
        cells += [f"{row['steps']:,.0f}", f"{row['state_bytes'] / KIB:.1f}"]
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def delta_gradients() -> str:
    """The table of docs/speed.md: forward and backward, beside transformers and linear attention."""
    lines = ["| computation | heads of | tokens | ms | transformers, times | beside linear attention, times |\n"]
    lines.append("|---|---|---|---|---|---|\n")
    titles = {"gradients": "gated delta", "channels": "gated delta, decay per channel", "decayed": "Mamba-2"}
    for part, title in titles.items():
        for row in _load("delta")[part]["rows"]:
            theirs, linear = (row["of ours"].get(name) for name in ("transformers", "linear attention"))
            cells = [title, f"{row['width']}", f"{row['tokens']:,}", f"{row['ms']['ours']:.0f}"]
            cells.append(f"{theirs['median']:.1f}" if theirs else "not timed")
            cells.append(f"{1 / linear['median']:.1f}" if linear else "")
            lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def delta_forward() -> str:
    """The table of docs/speed.md: forward alone, beside fused operators of others, and one token."""
    peers = (*_FUSED, "zentorch", "transformers")
    titles = [f"{name}, times" for name in ("`GatedDeltaNet`", "`LinearAttention`", "zentorch", "transformers")]
    lines = ["| call | processor | heads of | ms | " + " | ".join(titles) + " |\n", "|---" * 8 + "|\n"]
    for file in ("delta", "delta_epyc"):
        parts = _load(file)
        for part in ("forward", "step") if "step" in parts else ("forward",):
            for row in parts[part]["rows"]:
                if part == "forward":
                    title = f"{row['tokens']:,} tokens"
                else:
                    title = f"one token, batch {row['batch']}, {row['heads']} heads"
                    title += f", {row['key_heads']} of keys" if row["key_heads"] != row["heads"] else ""
                cells = [title, _processor(parts[part]), f"{row['width']}", f"{row['ms']['ours']:.3g}"]
                times = [row["of ours"].get(name) for name in peers]
                cells += [f"{x['median']:.2f}" if x else "" for x in times]
                lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def transformer_speed() -> str:
    """The table of docs/speed.md: the softmax Transformer beside encoders of the same weights."""
    peers = ("torch.nn.TransformerEncoder", "transformers ViT")
    lines = ["| rows × tokens, width, layers | | mnemos, ms | torch.nn | transformers | times the faster |\n"]
    lines.append("|---" * 6 + "|\n")
    measured = _load("transformer_speed")
    for row in measured["rows"]:
        shape = measured["shapes"][row["shape"]]
        cells = [f"{shape['batch']} × {shape['tokens']:,}, {shape['dim']}, {shape['layers']}"]
        cells.append("training step" if row["mode"] == "step" else "forward")
        cells += [f"{row['ms'][name]:,.{1 if row['ms'][name] < 100 else 0}f}" for name in ("mnemos", *peers)]
        lines.append("| " + " | ".join([*cells, f"**{1 / row['ratio to it']['median']:.2f}**"]) + " |\n")
    return "".join(lines)


def convolutions() -> str:
    """The table of docs/speed.md: the short convolution beside PyTorch."""
    lines = ["| tokens | channels | forward, ms | PyTorch, times | with gradients, ms | PyTorch, times |\n"]
    lines.append("|---|---|---|---|---|---|\n")
    rows = {(row["tokens"], row["channels"], row["gradients"]): row for row in _load("delta")["convolution"]["rows"]}
    for tokens, channels in sorted({key[:2] for key in rows}):
        cells = [f"{tokens:,}", f"{channels:,}"]
        for row in (rows[tokens, channels, False], rows.get((tokens, channels, True))):
            cells += [f"{row['ms']['ours']:.3g}", f"{row['of ours']['PyTorch']['median']:.1f}"] if row else ["", ""]
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def linearised_arms() -> str:
    """The table of docs/linearised.md: what training gives a linearised decoder, by arm."""
    titles = {
        "original": "original: softmax over all tokens",
        "window": "window and sinks, not trained",
        "window-trained": "window and sinks, trained alike",
        "window-longer": "… on as many tokens as both stages of the defaults read",
        "hedgehog": "`hedgehog`",
        "elu": "`linear`",
        "delta": "`delta`, the rate of β as of the maps",
        "delta-longer": "… longer",
        "delta-transferred": "`delta`, β at ten times the rate, three times the attention transfer at 3e-2",
        "delta-before-rotary": "… and features before rotary positions",
        "delta-forgets": "… and a half-life of 1,024 tokens: the defaults",
        "delta-forgets-wiki": "the defaults, WikiText-2's training split among the texts",
        "window-wiki": "window and sinks, trained so",
        "delta-labels": "`delta` that never forgets, stage 2 on the labels",
        "window-labels": "window and sinks, trained on the labels",
        "window-cache": "window and sinks with a gated cache of each stream",
        "window-cache-unwritten": "… the same, never written",
        "window-cache-few": "window and sinks with gated caches in six upper layers alone",
        "window-remember": "window with memory tokens, which take 32 of its 64",
    }
    lines = [
        "| | tokens of stage 2 | seeds | perplexity at 0–64 | 64–512 | 512–4,096 | bits per byte | of the gap, % "
        "| of Great Expectations | Moby Dick | WikiText-2 | facts of 128, 1,024, 4,096 tokens ago, % | state, KiB "
        "| MFLOPs a token |\n",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    ]
    for row in _load("linearised")["rows"]:
        title = titles[row["name"]]
        if not row["seeds"]:
            continue
        places = " | ".join(f"{row['positions'][name]:.1f}" for name in ("0-64", "64-512", "512-4096"))
        share = spread([100 * one for one in row.get("gap_closed", ())])
        closed = f"{share.mean:.0f}".replace("-", "−") if "gap_closed" in row else ""
        if (ends := interval(share)) is not None:
            closed += " ({:.0f} to {:.0f})".format(*ends)
        shares = row.get("gap_closed_of_texts", {})
        found = [[one for text, one in shares.items() if text.startswith(start)] for start in ("great", "moby", "wiki")]
        of_texts = " | ".join(f"{100 * spread(one[0]).mean:.0f}".replace("-", "−") if one else "" for one in found)
        told = {at["distance"]: f"{100 * at['choice']:.0f}" for at in row["recall"]}
        facts = ", ".join(told[distance] for distance in (128, 1024, 4096))
        state = f"{row['state_bytes'] / KIB:,.0f}"
        lines.append(
            f"| {title} | {row['tokens']:,} | {row['seeds']} | {places} | {row['bits_per_byte']:.3f} | {closed} "
            f"| {of_texts} | {facts} | {state} | {row['token_flops'] / 1e6:.0f} |\n"
        )
    return "".join(lines)


def linearised_told() -> str:
    """The table of docs/linearised.md: what memories trained on told facts recall and predict, by arm and seed."""
    titles = {
        "told-window": "window and sinks alone",
        "told-hedgehog": "`hedgehog`",
        "told-delta": "`delta`",
        "told-cache": "gated cache of each stream",
        "told-cache-unwritten": "gated cache, never written",
        "told-remember": "memory tokens",
    }
    lines = [
        "| | seeds | answers right at the end of training, % | right of 20 facts told 128 | 512 | 1,024 "
        "| 4,096 tokens ago | perplexity at 512–4,096 |\n",
        "|---|---|---|---|---|---|---|---|\n",
    ]
    for arm, runs in _load("linearised")["told"].items():
        title = titles[arm.removesuffix("-answers")] + (", answers alone" if arm.endswith("-answers") else "")
        right = ", ".join(f"{100 * run['training']['right']:.0f}" for run in runs)
        told = []
        for distance in (128, 512, 1024, 4096):
            at = [one for run in runs for one in run["recall"]["distances"] if one["distance"] == distance]
            told.append(", ".join(str(sum(one["choice"])) for one in at))
        predicted = [run["predicted"]["positions"]["512-4096"]["perplexity"] for run in runs if "predicted" in run]
        shown = ", ".join(f"{one:.1f}" for one in predicted)
        lines.append(f"| {title} | {len(runs)} | {right} | {' | '.join(told)} | {shown} |\n")
    return "".join(lines)


def linearised_speed() -> str:
    """The table of docs/speed.md: tokens a second and bytes of linearised decoders beside their own softmax."""
    lines = [
        "| | processor | state | rank | tokens of context | softmax, tokens a second | linearised | times as fast "
        "| softmax, MB of cache | linearised |\n",
        "|---|---|---|---|---|---|---|---|---|---|\n",
    ]
    rows = _load("linearised_speed")["rows"]
    keys = "part", "rank", "rotary", "context"
    softmax = {tuple(row[key] for key in keys): row for row in rows if row["model"] == "softmax"}
    for own in sorted(rows, key=lambda row: (row["part"], row["cpu"], row["model"], row["context"])):
        other = softmax.get(tuple(own[key] for key in keys))
        if own is other or other is None:
            continue
        state = f"`{own['model']}`" + (", `rotary=True`" if own["rotary"] else "")
        times = own["times_softmax"]
        fast = f"{times['median']:.2f} ({times['low']:.2f} to {times['high']:.2f})"
        speeds = " | ".join(f"{row['tokens_per_second']:,.1f}" for row in (other, own))
        sizes = " | ".join(f"{row['state_bytes'] / 1e6:,.1f}" for row in (other, own))
        lines.append(
            f"| {own['part']} | {own['cpu'].removesuffix(' Processor').replace('(R)', '')} | {state} | {own['rank']} "
            f"| {own['context']:,} | {speeds} | {fast} | {sizes} |\n"
        )
    return "".join(lines)


def encoder_classes() -> str:
    """The table of docs/memories.md: a gated cache in an encoder that classifies passages of novels, and controls."""
    read = {"texts-last": "the last segment", "texts": "all segments, averaged"}
    kinds = {
        "": "no cache",
        "-cached": "gated cache, carried",
        "-cached-unwritten": "the same, never written",
        "-cached-wider": "adapters of as many parameters",
    }
    found = _load("encoder_classes")
    lines = [
        "| the class is read from | | test accuracy | gated cache − this (95 %) | p (Holm) |\n",
        "|---|---|---|---|---|\n",
    ]
    against = {row["minus"]: row for rows in found["differences"].values() for row in rows}
    for stem, title in read.items():
        for end, kind in kinds.items():
            if stem + end not in found["arms"]:
                continue
            arm, row = found["arms"][stem + end], against.get(stem + end)
            score = f"{arm['test']['mean']:.3f} ± {arm['test']['std']:.3f}"
            cells = " | "
            if row is not None and row["interval"] is not None:
                low, high = row["interval"]
                cells = f"{row['difference']:+.3f} ({low:+.3f} to {high:+.3f}) | {row['p_holm']:.3f}".replace("-", "−")
            lines.append(f"| {title} | {kind} | {score} | {cells} |\n")
    return "".join(lines)


def state_bits() -> str:
    """The table of docs/memories.md: what smaller states cost trained models that answer from them."""
    kinds = {"bfloat16": "bfloat16", "int8, rounding alone": "int8, rounding alone", "int8": "`int8`"}
    lines = [
        "| memory | task, tokens a row | times written | seeds | right, % "
        + "".join(f"| {title} " for title in kinds.values()) + "|\n",
        "|---|---|---|---|---|---|---|---|\n",
    ]  # fmt: skip
    found: dict[tuple[str, str, int, int], list[Value]] = {}
    for file, task in (("state_bits", "MQAR"), ("state_bits_told", "a told fact")):
        for row in _load(file)["rows"]:
            name = row["run"].split("/")[1]
            found.setdefault((name, task, row["length"], row["every"]), []).append(row)
    for (name, task, length, every), rows in found.items():
        if every > min(e for n, t, size, e in found if (n, t, size) == (name, task, length)):
            continue  # the state that is written most often shows the most
        exact = [row["accuracy"] for row in rows if row["kind"] == "exact"]
        cells = [f"`{name}`", f"{task}, {length}", f"{-(-length // every) - 1}", f"{len(exact)}"]
        cells.append(", ".join(f"{100 * x:.2f}" for x in exact))
        for kind in kinds:
            own = [row for row in rows if row["kind"] == kind]
            gains = [100 * (row["accuracy"] - x) for row, x in zip(own, exact, strict=True)]
            changed = ", ".join(f"{x:+.2f}".replace("-", "−") for x in gains) if any(gains) else "none"
            apart = max(row["apart"] for row in own)
            cells.append(f"{f'{apart:.3f}' if apart >= 0.0005 else '< 0.0005'}; {changed}")
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def which() -> str:
    """The table of docs/choosing.md: the memories that were compared, a number a task; bold: the best of its column."""
    first, corrects = (
        {one["name"]: {row["name"]: row for row in one["rows"]} for one in _load(file)["benchmarks"]}
        for file in ("bench_memory", "memories_that_forget")
    )
    texts = {
        row["name"].removeprefix("text-state-"): row
        for file in ("text_state", "text_forgets")
        for row in _load(file)["rows"]
    }
    told = {row["name"].removeprefix("demo-").replace("demo", "window"): row for row in _load("demo")["rows"]}
    names = {
        "softmax": ("softmax", ""), "window": ("window", "window"), "linear": ("linear", "linear"),
        "mamba2": ("Mamba-2", "mamba2"), "gated-delta": ("gated delta (Qwen3-Next)", "gated-delta"),
        "delta": ("delta rule", "delta"), "kimi-delta": ("Kimi Delta Attention", "kimi-delta"),
        "transformer-xl": ("Transformer-XL", "xl"),
        "gated-cache": ("gated cache per stream, window", "cached"), "memformer": ("Memformer", "memformer"),
        "rmt": ("memory tokens (RMT)", "rmt"),
    }  # fmt: skip
    facts = {"window": "window", "linear": "linear", "gated-cache": "cached", "memformer": "memformer"}
    rows = []
    for name, (title, text) in names.items():
        pairs = first["mqar"].get(name) or corrects["mqar"][name]
        bits = texts.get(text, {}).get("against")
        scores = [
            (told[facts[name]]["along"]["values"][-1]["mean"], 1) if name in facts else None,
            (pairs["mean"], 1),
            (corrects["mqar-rewritten"][name]["mean"], 1) if name in corrects["mqar-rewritten"] else None,
            (bits["difference"], -1) if bits else (0.0, -1) if text == "xl" else None,
        ]
        rows.append((title, scores, f"{pairs['state_bytes'] / KIB:.0f}"))
    best = [max((s[1][i][0] * s[1][i][1] for s in rows if s[1][i]), default=0.0) for i in range(4)]
    heads = (
        "a told fact, 512 words later",
        "eight pairs of key and value",
        "eight pairs, four rewritten",
        "novels, bits a byte over Transformer-XL's (less is better)",
    )
    lines = [f"| memory | {' | '.join(heads)} | state, KiB |\n"]
    lines.append("|---|---|---|---|---|---|\n")
    for title, scores, state in rows:
        cells = []
        for i, score in enumerate(scores):
            shown = "–" if score is None else f"{score[0]:+.2f}".replace("-", "−") if i == 3 else f"{score[0]:.2f}"
            cells.append(f"**{shown}**" if score and score[0] * score[1] > best[i] - 0.005 else shown)
        lines.append(f"| {title} | " + " | ".join([*cells, state]) + " |\n")
    return "".join(lines)


def fast_models() -> str:
    """The table of docs/speed.md: whole models of Transformers, as they come and with mnemos.fast."""
    parts = ("training step", "prefill", "token, batch 1")
    lines = ["| model | processor | training step, ms | prefill, ms | one token, ms |\n", "|---|---|---|---|---|\n"]
    titles = {"Mamba2": "Mamba-2", "Qwen3Next": "Qwen3-Next", "KimiLinear": "Kimi Linear", "Mamba": "Mamba"}
    titles |= {"Llama": "Llama", "Bert": "BERT", "SmolLM2": "SmolLM2-135M", "ViT": "ViT-S"}
    files = [_load(file) for file in ("fast_models", "fast_models_epyc")]
    rows = [(row, found) for model in titles for found in files for row in found["rows"] if row["model"] == model]
    more = _load("fast_models_more")
    for row, found in [*rows, *((row, more) for row in more["rows"])]:
        usual = (row["tokens"] == 1024 and row["width"] == 64) or row["model"] in ("SmolLM2", "ViT")
        cells = [titles[row["model"]] + ("" if usual else f", {row['tokens']:,} tokens, heads of {row['width']}")]
        cells.append(_processor(found))
        for part in parts:
            ms = row.get(part, {}).get("ms", {})
            digits = 0 if part == "training step" else 1
            cell = ""
            if "transformers" in ms:
                times = row[part]["times as fast"]
                undecided = f" ({times['low']:.2f} to {times['high']:.2f})" if times["low"] < 1 < times["high"] else ""
                cell = f"{ms['transformers']:,.{digits}f} → {ms['mnemos']:,.{digits}f}: "
                cell += f"**{times['median']:.1f}**{undecided}"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def linear_speed() -> str:
    """The table of docs/speed.md: linear attention beside the paper's own library, forward and backward."""
    found = _load("linear_attention")
    lines = [
        f"| tokens ({_processor(found)}) | heads of | ms | fast-transformers, times | PyTorch in chunks, times |\n",
        "|---|---|---|---|---|\n",
    ]
    for row in found["rows"]:
        times = [row["of native's time"][name]["median"] for name in ("fast-transformers", "chunked")]
        lines.append(
            f"| {row['tokens']:,} | {row['width']} | {row['ms']['native']:.1f} | {times[0]:.1f} | {times[1]:.1f} |\n"
        )
    return "".join(lines)


def decoding_speed() -> str:
    """The table of docs/speed.md: a token of the papers' model by the fused step."""
    found = _load("decoding")
    names = {
        "plain": "the model, unfused",
        "fast-transformers": "fast-transformers",
        "softmax, 784 cached": "softmax, 784 keys",
    }
    lines = [
        f"| rows ({_processor(found)}) | fused step, ms | "
        + " | ".join(f"{name}, times" for name in names.values())
        + " |\n"
    ]
    lines.append("|---|---|" + "---|" * len(names) + "\n")
    for row in found["token"]:
        times = (row["of fused's time"].get(name) for name in names)
        cells = [f"{row['batch']}", f"{row['ms']['fused']:.2f}", *(f"{x['median']:.1f}" if x else "" for x in times)]
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def translation_speed() -> str:
    """The table of docs/speed.md: a beam search beside the peers' on the same weights."""
    lines = [
        "| sentences | width | processor | ours, ms | Transformers, times | CTranslate2, float32, times "
        "| CTranslate2, int8, times |\n|---|---|---|---|---|---|---|\n"
    ]
    for sentences, shape, width in ((1, "small", 128), (1, "iwslt", 512), (32, "small", 128), (32, "iwslt", 512)):
        # one sentence was measured again on the Xeon, when the kernel read a beam of five in one pass
        for file in ("translation_one_sentence" if sentences == 1 else "translation_speed", "translation_speed_amd"):
            found = _load(file)
            row = found["rows"][f"{shape}, decode, batch {sentences}"]
            peers = (row.get(name) for name in ("transformers", "ctranslate2 float32", "ctranslate2 int8"))
            times = " | ".join(f"{peer['ratio']:.1f}" if peer else "" for peer in peers)
            ms = 1000 * row["mnemos"]["seconds"]
            lines.append(f"| {sentences} | {width} | {_processor(found)} | {ms:,.0f} | {times} |\n")
    return "".join(lines)


def rollout_cost() -> str:
    """The table of docs/speed.md: gradients through segments of a Mamba, by four ways."""
    found = _load("rollouts")
    ways = {
        "back-propagation": "back-propagation",
        "torch.utils.checkpoint": "`torch.utils.checkpoint`",
        "replay": "replay",
    }
    heads = [f"{way}: {unit}" for way in ways.values() for unit in ("MiB", "s")]
    lines = [
        f"| segments of {found['segment']} ({_processor(found)}) | " + " | ".join(heads) + " |\n",
        "|---|" + "---|" * len(heads) + "\n",
    ]
    for count, row in found["segments"].items():
        cells = [c for way in ways for c in (f"{row[way]['peak_bytes'] / 2**20:.0f}", f"{row[way]['seconds']:.1f}")]
        lines.append(f"| {count} | " + " | ".join(cells) + " |\n")
    return "".join(lines)


def claims(paper: str = "") -> str:
    """The table of a page of claims, or of docs/claims.md: the rows of all papers without their numbers."""
    if not paper:
        lines = []
        for name, page, title in _PAPERS:
            lines += [f"\n## [{title}]({page}.md)\n\n", "| | item | in one line |\n", "|---|---|---|\n"]
            rows = (row for row in verdicts(name) if not row.item.startswith("Not in the paper"))
            lines += [f"| {row.symbol} | {row.item} | {row.line} |\n" for row in rows]
        return "".join(lines)[1:]
    lines = ["| | item | paper | here | in one line |\n", "|---|---|---|---|---|\n"]
    for row in verdicts(paper):
        here = re.sub(r"<([^|>]*)\|([^|>]*)\|([^|>]*)>", lambda found: _number(*found.groups()), row.here)
        lines.append(f"| {row.symbol} | {row.item} | {row.paper} | {here} | {row.line} |\n")
    return "".join(lines)


def _number(file: str, path: str, form: str) -> str:
    """A number of results/FILE.json by a path of `mnemos.lab.papers.verdicts`."""
    path, _, divided_by = path.partition(" ÷ ")
    if divided_by:
        return f"{float(_number(file, path, '.9g')) / float(_number(file, divided_by, '.9g')):{form}}"
    choose = {"min": min, "max": max}.get(path.partition(":")[0])
    values: list[Value] = [_load(file)]
    for part in path.partition(":")[2 if choose else 0].split("/"):
        key = part.replace("~", "/")
        name, _, wanted = key.partition("=")
        found: list[Value] = []
        for value in values:
            if key == "*":
                found += value
            elif isinstance(value, dict):
                found.append(value[key])
            elif key.lstrip("-").isdigit():
                found.append(value[int(key)])
            else:
                (one,) = (item for item in value if str(item.get(name)) == wanted)
                found.append(one)
        values = found
    value = choose(values) if choose else values[0]
    if form == "s":
        return str(value)
    if form.startswith("±"):
        return f"{value['mean']:{form[1:]}} ± {value['std']:{form[1:]}}"
    form, _, divisor = form.partition("/")
    return f"{float(value) / float(divisor or 1):{form}}".replace("-", "−")


def _processor(found: Value) -> str:
    return "Intel Xeon" if "Xeon" in found["provenance"]["cpu"] else "AMD EPYC"


def _row(entry: Value, name: str) -> Value:
    return next((row for row in entry["rows"] if row["name"] == name), None)


def _best(rows: list[Value]) -> set[str]:
    """The memories within .01 of the best mean; none if a range of ± one standard deviation meets that of another."""
    top = max(row["mean"] for row in rows)
    best = {row["name"] for row in rows if row["mean"] >= top - 0.01}
    if any(row["std"] is None for row in rows):  # one seed: nothing is known about another
        return set()
    low = min(row["mean"] - row["std"] for row in rows if row["name"] in best)
    return best if all(row["mean"] + row["std"] < low for row in rows if row["name"] not in best) else set()


def _score(row: Value, best: bool) -> str:
    """Mean and standard deviation of a score; bold: one of the best."""
    mean = f"{row['mean']:.2f}"
    spread = "" if row["std"] is None else f" ± {row['std']:.2f}"
    return (f"**{mean}**" if best else mean) + spread


def _load(name: str) -> Value:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


TABLES: dict[str, Callable[[], str]] = {
    "claims": claims,
    "claims-cached": partial(claims, "cached_transformers"),
    "claims-linear": partial(claims, "linear_transformers"),
    "claims-memformer": partial(claims, "memformer"),
    "which": which,
    "fast-models": fast_models,
    "linear-speed": linear_speed,
    "decoding-speed": decoding_speed,
    "translation-speed": translation_speed,
    "rollout-cost": rollout_cost,
    "what-helped": what_helped,
    "other-tasks": other_tasks,
    "small-images": small_images,
    "stream-caches": stream_caches,
    "which-memory": which_memory,
    "which-forgets": which_forgets,
    "text-state": text_state,
    "text-forgets": partial(text_state, "text_forgets"),
    "delta-gradients": delta_gradients,
    "delta-forward": delta_forward,
    "transformer-speed": transformer_speed,
    "convolutions": convolutions,
    "linearised-arms": linearised_arms,
    "linearised-told": linearised_told,
    "linearised-speed": linearised_speed,
    "encoder-classes": encoder_classes,
    "state-bits": state_bits,
}


def render(text: str, page: str) -> tuple[str, list[str]]:
    """The page with its tables written anew, and a line for each line of a table that was another."""
    wrong: list[str] = []

    def table(match: re.Match[str]) -> str:
        name, before = match.groups()
        if name not in TABLES:
            wrong.append(f"{page}: expected a table of {', '.join(TABLES)}, found {name}")
            return match[0]
        made = TABLES[name]()
        first = text.count("\n", 0, match.start()) + 2
        for number, (ours, theirs) in enumerate(
            zip_longest(before.splitlines(), made.splitlines(), fillvalue=""), first
        ):
            if ours != theirs:
                wrong.append(f"{page}:{number}: the page says {ours!r}, the table {name} {theirs!r}")
        return f"<!--table {name}-->\n{made}<!--/table-->"

    return TABLE.sub(table, text), wrong


def main(argv: list[str] | None = None) -> int:
    """Write the tables, or with `--check` compare them; 1 where a page has another one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page and its table differ")
    check, failed = parser.parse_args(argv).check, False
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text, wrong = render(page.read_text(), str(page.relative_to(ROOT)))
        if wrong and check:
            failed = True
            print(*wrong, "make numbers writes the tables", sep="\n", file=sys.stderr)
        elif wrong:
            page.write_text(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
