"""Write the tables of pages from results/*.json, and log/README.md: `python tools/page_tables.py [--check]`.

A table stands between `<!--table NAME-->` and `<!--/table-->`. A function of its name, with _ for -, gives its rows,
of which the first are the heads.
`--check` writes nothing; it fails where a page has other lines than these, and prints both.
"""

import argparse
import difflib
import functools
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import log_index

from mnemos.lab.compare.significance import Spread, correct, interval, spread, welch
from mnemos.lab.papers.verdicts import verdicts

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"<!--table (\S+)-->\n(.*?)<!--/table-->", re.DOTALL)
KIB = 2.0**10
Value = Any  # what JSON holds
Rows = Iterator[Sequence[object]]


# ---- what the tables share ----


@functools.cache
def _load(name: str) -> Value:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def _table(rows: Iterable[Sequence[object]]) -> str:
    heads, *rest = (f"| {' | '.join(map(str, row))} |\n" for row in rows)
    return heads.replace("|  |", "| |", 1) + "|" + "---|" * (heads.count("|") - 1) + "\n" + "".join(rest)


def _minus(numbers: str) -> str:
    """Numbers with a true minus."""
    return numbers.replace("-", "−")


def _signed(value: float, form: str) -> str:
    """A number with its sign; never −0.0."""
    return _minus(f"{float(f'{value:{form}}') + 0.0:+{form}}")


def _percent(share: float) -> str:
    return _minus(f"{100 * share:.0f}")


def _percents(shares: Iterable[float]) -> str:
    return ", ".join(map(_percent, shares))


def _with_interval(middle: float, ends: Iterable[float], form: str) -> str:
    return "{} ({} to {})".format(*(_signed(one, form) for one in (middle, *ends)))


def _mean_and_std(row: Value, form: str, seeds: int | None = None) -> str:
    """The number of seeds in brackets, unless it is `seeds`."""
    if row is None:
        return "not run"
    count = "" if seeds is None or row["seeds"] == seeds else f" ({row['seeds']})"
    return f"{row['mean']:{form}} ± {row['std']:{form}}{count}"


def _times(peers: Value, names: Iterable[str], form: str = ".1f") -> list[str]:
    """How many times ours each of these peers took; empty for one that was not timed."""
    return [f"{peers[name]['median']:{form}}" if name in peers else "" for name in names]


def _p(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value >= 0.005 else "< 0.01"


def _named(rows: Iterable[Value]) -> dict[str, Value]:
    return {row["name"]: row for row in rows}


def _benchmarks(file: str) -> dict[str, dict[str, Value]]:
    """The rows of each benchmark of a file, by name."""
    return {one["name"]: _named(one["rows"]) for one in _load(file)["benchmarks"]}


def _processor(file: Value) -> str:
    return "Intel Xeon" if "Xeon" in file["provenance"]["cpu"] else "AMD EPYC"


Arms = Sequence[Value]  # a title, no cache, equal parameters, cached, never written


def _beside_controls(score: str, rows: Sequence[Arms], form: str, seeds: int = 5) -> Rows:
    """A row for each model with a cache; p is corrected over the rows (Holm). A column without values is left out."""
    shown = [i for i in range(4) if any(arms[i] is not None for _, *arms in rows)]
    heads = (("no cache", "equal parameters", "cached", "never written")[i] for i in shown)
    yield [score, *heads, "cached − never written (95 %)", "p"]
    spreads = [[Spread(arm["mean"], arm["std"], arm["seeds"]) for arm in arms[2:]] for _, *arms in rows]
    for (title, *arms), gain in zip(rows, correct([welch(*both) for both in spreads]), strict=True):
        assert gain.interval is not None, f"{title}: expected two seeds or more"
        difference = _with_interval(gain.difference, gain.interval, form)
        cells = (_mean_and_std(arms[i], form, seeds) for i in shown)
        yield [title, *cells, difference, _p(gain.p_holm)]


def _arms(title: str, file: str, stem: str, *endings: str) -> Arms:
    rows = _named(_load(file)["rows"])
    return [title, *(rows[stem + ending] for ending in endings)]


def _cache_per_stream(title: str, rows: dict[str, Value]) -> Arms:
    return title, rows["window"], None, rows["gated-cache"], rows["gated-cache-unwritten"]


# ---- docs/choosing.md, docs/memories.md ----


def which() -> Rows:
    """The memories that were compared, a number a task; bold: the best of its column."""
    first, corrects = _benchmarks("bench_memory"), _benchmarks("memories_that_forget")
    texts = _named(_load("text_state")["rows"]) | _named(_load("text_forgets")["rows"])
    told = _named(_load("demo")["rows"])
    names = {
        "softmax": ("softmax", "", ""), "window": ("window", "window", "demo"),
        "linear": ("linear", "linear", "demo-linear"),
        "mamba2": ("Mamba-2", "mamba2", ""), "gated-delta": ("gated delta (Qwen3-Next)", "gated-delta", ""),
        "delta": ("delta rule", "delta", ""), "kimi-delta": ("Kimi Delta Attention", "kimi-delta", ""),
        "transformer-xl": ("Transformer-XL", "xl", ""),
        "gated-cache": ("gated cache per stream, window", "cached", "demo-cached"),
        "memformer": ("Memformer", "memformer", "demo-memformer"), "rmt": ("memory tokens (RMT)", "rmt", ""),
    }  # fmt: skip
    rows = []
    for name, (title, text, fact) in names.items():
        pairs = first["mqar"].get(name) or corrects["mqar"][name]
        bits = texts.get(f"text-state-{text}", {}).get("against")
        rewritten = corrects["mqar-rewritten"].get(name)
        scores = [
            told[fact]["along"]["values"][-1]["mean"] if fact else None,
            pairs["mean"],
            rewritten["mean"] if rewritten else None,
            -bits["difference"] if bits else 0.0 if text == "xl" else None,
        ]
        rows.append((title, scores, f"{pairs['state_bytes'] / KIB:.0f}"))
    best = [max((scores[i] for _, scores, _ in rows if scores[i] is not None), default=0.0) for i in range(4)]

    def cell(i: int, score: float | None) -> str:
        shown = "–" if score is None else _signed(-score, ".2f") if i == 3 else f"{score:.2f}"
        return f"**{shown}**" if score is not None and score > best[i] - 0.005 else shown

    heads = ["memory", "a told fact, 512 words later", "eight pairs of key and value", "eight pairs, four rewritten"]
    yield [*heads, "novels, bits a byte over Transformer-XL's (less is better)", "state, KiB"]
    yield from ([title, *map(cell, range(4), scores), state] for title, scores, state in rows)


def which_memory() -> Rows:
    """Every memory's scores, and its state and seconds in the first benchmark."""
    benchmarks = _load("bench_memory")["benchmarks"]
    tables, best = [_named(one["rows"]) for one in benchmarks], [_best(one["rows"]) for one in benchmarks]
    state = f"state, KiB, in `{benchmarks[0]['name']}`"
    yield ["memory", *(f"`{one['name']}`" for one in benchmarks), state, "seconds"]
    for name in dict.fromkeys(name for table in tables for name in table):
        cells = []
        for table, top in zip(tables, best, strict=True):
            score = _at_best_rate(table[name], ".2f") if name in table else "failed"
            cells.append(re.sub(r"^\S+", r"**\g<0>**", score) if name in top else score)
        first = tables[0].get(name)
        costs = [f"{first['state_bytes'] / KIB:.1f}", f"{first['seconds']:.0f}"] if first else ["", ""]
        yield [name, *cells, *costs]
    yield ["a guess", *(f"{one['chance']:.2f}" for one in benchmarks), "", ""]


def _at_best_rate(row: Value, form: str) -> str:
    """The score, with an arrow where the best learning rate was the highest that was tried."""
    return _mean_and_std(row, form, 3) + "↑" * (row["rate"] == max(rate for rate, _ in row["rates"]))


def _best(rows: list[Value]) -> set[str]:
    """The memories within .01 of the best mean; none if a range of ± one standard deviation meets that of another."""
    top = max(row["mean"] for row in rows)
    best = {row["name"] for row in rows if row["mean"] >= top - 0.01}
    low = min(row["mean"] - row["std"] for row in rows if row["name"] in best)
    return best if all(row["mean"] + row["std"] < low for row in rows if row["name"] not in best) else set()


def constant_start() -> Rows:
    """A cache read per row beside constants from which its updates start."""
    titles = {"written": "the written cache", "never written": "zeros", "learned": "a learned array"}
    titles |= {"random": "random numbers of ± .02", "large": "random numbers of ± .5"}
    file = _load("constant_start")
    columns = [(data, preset) for data in file for preset in ("paper, per row", "mnemos")]
    yield ["an update starts from", *map(", ".join, columns)]
    for name, title in titles.items():
        scores = (file[data]["scores"][f"{preset}: {name}"] for data, preset in columns)
        yield [title, *(_mean_and_std(score, ".1f") for score in scores)]


def stream_caches() -> Rows:
    """What a written cache per stream adds, in every default benchmark."""
    rows = [_cache_per_stream(f"`{name}`", rows) for name, rows in _benchmarks("bench_memory").items()]
    yield from _beside_controls("test accuracy, cache per stream", rows, ".3f", seeds=3)


def which_forgets() -> Rows:
    """Linear attention, softmax attention and the layers that forget and correct."""
    corrects = _benchmarks("memories_that_forget")
    recall = _benchmarks("bench_memory")["mqar"] | corrects["mqar"]
    heads = ["memory", "state, KiB", "`mqar`", "in 512 tokens", "`mqar-rewritten`", "rewritten keys"]
    heads += ["their old values", "`mqar-two-tokens`"]
    yield heads
    for name, again in sorted(corrects["mqar-rewritten"].items(), key=lambda item: -recall[item[0]]["mean"]):
        row = recall[name]
        beside = (_mean_and_std({"seeds": 3, **one}, ".3f", 3) for one in again["beside"].values())
        two = _at_best_rate(corrects["mqar-two-tokens"][name], ".3f") if name in corrects["mqar-two-tokens"] else ""
        state, beyond = f"{row['state_bytes'] / KIB:.1f}", f"{row['beyond'][-1]['mean']:.2f}"
        yield [name, state, _at_best_rate(row, ".3f"), beyond, _at_best_rate(again, ".3f"), *beside, two]


def _texts(file: str) -> Rows:
    yield ["memory", "bits per byte", "minus Transformer-XL", "updates", "state, KiB"]
    for row in sorted(_load(file)["rows"], key=lambda row: row["mean"]):
        against, name = row["against"], row["name"].removeprefix("text-state-")
        gain = "" if against is None else _with_interval(against["difference"], against["interval"], ".3f")
        yield [name, _mean_and_std(row, ".3f"), gain, f"{row['steps']:,.0f}", f"{row['state_bytes'] / KIB:.1f}"]


def state_bits() -> Rows:
    """What smaller states cost trained models that answer from them."""
    dtypes = {"bfloat16": "bfloat16", "int8, rounding alone": "int8, rounding alone", "int8": "`int8`"}
    groups: dict[tuple[str, str, int, int], list[Value]] = {}
    for file, task in (("state_bits", "MQAR"), ("state_bits_told", "a told fact")):
        for row in _load(file)["rows"]:
            name = row["run"].split("/")[1]
            groups.setdefault((name, task, row["length"], row["every"]), []).append(row)
    heads = ["memory", "task, tokens a row", "times written", "seeds", "right, %"]
    yield [*heads, *dtypes.values()]
    for (name, task, length, every), rows in groups.items():
        if every > min(e for n, t, size, e in groups if (n, t, size) == (name, task, length)):
            continue  # the state that is written most often shows the most
        exact = [row["accuracy"] for row in rows if row["kind"] == "exact"]
        cells = [f"`{name}`", f"{task}, {length}", f"{-(-length // every) - 1}", f"{len(exact)}"]
        cells.append(", ".join(f"{100 * x:.2f}" for x in exact))
        for dtype in dtypes:
            own = [row for row in rows if row["kind"] == dtype]
            gains = [100 * (row["accuracy"] - x) for row, x in zip(own, exact, strict=True)]
            changed = _minus(", ".join(f"{x:+.2f}" for x in gains)) if any(gains) else "none"
            apart = max(row["apart"] for row in own)
            cells.append(f"{f'{apart:.3f}' if apart >= 0.0005 else '< 0.0005'}; {changed}")
        yield cells


def what_helped() -> Rows:
    """A gated cache beside its baselines, mean and spread over the seeds."""
    hosts = {
        "MNIST, ViT": ("mnist_vit", "mnist-vit"),
        "digits 8 × 8, ViT": ("digits_vit", "digits-vit"),
        "540 photos, ViT": ("photos_vit", "photos-vit"),
        "short ListOps": ("demo_unwritten", "demo"),
    }
    endings = "", "-wider", "-cached", "-cached-unwritten"
    rows = [_arms(title, *host, *endings) for title, host in hosts.items()]
    recall = _cache_per_stream("MQAR (recall of pairs), cache per stream", _benchmarks("bench_memory")["mqar"])
    yield from _beside_controls("test accuracy", [*rows, recall], ".3f")


def other_tasks() -> Rows:
    """Small forms of the tables of Cached Transformers on other tasks."""
    endings = "", "-cached-wider", "-cached", "-cached-unwritten"
    rows = [
        _arms("shapes, Mask R-CNN, default preset: box AP", "shapes_arms", "shapes-mask-rcnn", *endings),
        _arms("Multi30k, default preset: BLEU", "multi30k_demo", "multi30k-demo", *endings),
        ("Multi30k, `paper`: BLEU", None, None, *_load("multi30k_paper")["rows"]),
    ]
    endings = "", "-wider", "-paper", "-paper-constant"
    rows.append(_in_percent(*_arms("MNIST, ViT, `paper`: accuracy, %", "mnist_vit", "mnist-vit", *endings)))
    for name, entry in _load("listops_128")["comparisons"].items():
        plain, cached, control, wider = entry["rows"]
        title = f"ListOps of 64 to 128 symbols, {name}, `paper`: accuracy, %"
        rows.append(_in_percent(title, plain, wider, cached, control))
    yield from _beside_controls("score", rows, ".1f", seeds=3)


def _in_percent(title: str, *arms: Value) -> Arms:
    return [title, *({**arm, "mean": 100 * arm["mean"], "std": 100 * arm["std"]} for arm in arms)]


def encoder_classes() -> Rows:
    """A gated cache in an encoder that classifies passages of novels, and controls."""
    read = {"texts": "all segments, averaged", "texts-last": "the last segment"}
    variants = {
        "": "no cache",
        "-cached": "gated cache, carried",
        "-cached-unwritten": "the same, never written",
        "-cached-wider": "adapters of as many parameters",
    }
    file = _load("encoder_classes")
    against = {row["minus"]: row for rows in file["differences"].values() for row in rows}
    yield ["the class is read from", "", "test accuracy", "gated cache − this (95 %)", "p (Holm)"]
    for name, arm in file["arms"].items():
        stem = name.partition("-cached")[0]
        cells = ["", ""]
        if row := against.get(name):
            cells = [_with_interval(row["difference"], row["interval"], ".3f"), f"{row['p_holm']:.3f}"]
        yield [read[stem], variants[name.removeprefix(stem)], _mean_and_std(arm["test"], ".3f"), *cells]


# ---- docs/cached-transformers.md and the other papers' pages ----


def small_images() -> Rows:
    """Tables 1 and 2 of Cached Transformers in a small form, each cache beside its baseline."""
    hosts = {"digits-vit": "ViT", "digits-pvt": "PVT v2", "digits-swin": "Swin"}
    caches = {
        "-attention-cache": "attention-based",
        "-paper": "GRC, paper",
        "-paper-rows": "GRC, paper, per row",
        "-cached": "GRC, mnemos",
    }
    first, second = (_load(name)["tables"] for name in ("cached_table1", "cached_table2"))
    accuracies, keys = ({row[""]: row for row in table[1]["rows"]} for table in (first, second))
    gains = {row[""]: row for row in (*second[2]["rows"], *first[2]["rows"])}
    heads = ["small host, on digits", "accuracy, %", "minus none (95 %), points", "p", "never written"]
    yield [*heads, "minus never written (95 %)", "p"]
    for host, row in accuracies.items():
        yield [f"{hosts[host]}, none", row["none"], "", "", "", "", ""]
        for ending, cache in caches.items():
            if (gain := gains.get(host + ending)) is None:
                continue
            control = "" if gain["control"] is None else row[gain["control"]]
            cells = [(row if cache in row else keys[host])[cache], gain["to none"], _p(gain["p, none"]), control]
            yield [f"{hosts[host]}, {cache}", *cells, gain["to its control"] or "", _p(gain["p, control"])]


_PAPERS = (
    ("cached_transformers", "cached-transformers", "Cached Transformers"),
    ("linear_transformers", "linear-transformers", "Transformers are RNNs"),
    ("memformer", "memformer-paper", "Memformer"),
)


def claims() -> str:
    """The rows of all papers without their numbers."""
    parts = []
    for name, page, title in _PAPERS:
        rows = [row for row in verdicts(name) if not row.item.startswith("Not in the paper")]
        table = _table([("", "item", "in one line"), *((row.symbol, row.item, row.line) for row in rows)])
        parts.append(f"## [{title}]({page}.md)\n\n{table}")
    return "\n".join(parts)


def _claims_of(paper: str) -> str:
    """The table of a paper's page."""
    rows: list[Sequence[object]] = [("", "item", "paper", "here", "in one line")]
    for row in verdicts(paper):
        try:
            here = re.sub(r"<([^|>]*)\|([^|>]*)\|([^|>]*)>", lambda match: _number(*match.groups()), row.here)
        except (OSError, LookupError, ValueError) as error:
            message = f"verdict {row.item!r}: expected numbers of results/, found {error!r}; correct its paths"
            raise SystemExit(message) from error
        rows.append((row.symbol, row.item, row.paper, here, row.line))
    return _table(rows)


def _number(file: str, path: str, form: str) -> str:
    """A number of results/FILE.json by a path of `mnemos.lab.papers.verdicts`."""
    path, _, divisor_path = path.partition(" ÷ ")
    if divisor_path:
        return f"{float(_number(file, path, '.9g')) / float(_number(file, divisor_path, '.9g')):{form}}"
    choose = {"min": min, "max": max}.get(path.partition(":")[0])
    values: list[Value] = [_load(file)]
    for part in path.partition(":")[2 if choose else 0].split("/"):
        key = part.replace("~", "/")
        name, _, wanted = key.partition("=")
        inner: list[Value] = []
        for value in values:
            if key == "*":
                inner += value
            elif isinstance(value, dict):
                inner.append(value[key])
            elif key.lstrip("-").isdigit():
                inner.append(value[int(key)])
            else:
                (one,) = (item for item in value if str(item.get(name)) == wanted)
                inner.append(one)
        values = inner
    value = choose(values) if choose else values[0]
    if form == "s":
        return str(value)
    if form.startswith("±"):
        return _mean_and_std(value, form[1:])
    form, _, divisor = form.partition("/")
    return _minus(f"{float(value) / float(divisor or 1):{form}}")


# ---- docs/linearised.md ----


def linearised_decoders() -> Rows:
    """What a decoder keeps of its past and what it costs: whole, in a window, linearised, and as a hybrid."""
    titles = {
        "original": "the decoder: softmax over all tokens",
        "window": "a window of 64 tokens and 4 sinks, not trained",
        "window-wiki": "… trained alike",
        "delta-forgets-wiki": "**window and state**: the defaults",
        "window-wiki-longer": "the window, on 131,072 tokens of stage 2",
        "delta-forgets-wiki-longer": "… window and state",
        "untrained-hybrid-8": "8 of 30 attentions whole, windows beside them, not trained",
        "window-hybrid-8": "… trained alike",
        "hybrid-8": "**8 of 30 whole, window and state beside them**",
        "hybrid-8-labels": "… stage 2 on the text's labels, not on what the decoder predicts",
        "window-hybrid-8-labels": "… the same with windows alone beside them",
        "whole-labels": "… the same with all attentions whole",
        "hybrid-8-novels": "… half of the text from six novels, in bfloat16",
        "hybrid-8-longer": "… on 163,840 tokens of stage 2, in bfloat16",
        "heads-24": "24 of 90 key heads whole, window and state beside them",
        "window-hybrid-12": "12 of 30 whole, windows beside them, trained alike",
        "hybrid-12": "12 of 30 whole, window and state beside them",
    }
    heads = ["", "seeds", "perplexity at 512–4,096", "of the gap, %", "of Great Expectations, Moby Dick, WikiText-2"]
    heads += ["facts of 128, 1,024, 4,096 tokens ago, %", "keys, values and state after 4,096 tokens, MB"]
    yield [*heads, "MFLOPs a token"]
    for title, row in _linearised(titles):
        told = {at["distance"]: at["choice"] for at in row["recall"]}
        facts = _percents(told[distance] for distance in (128, 1024, 4096))
        cells = [title, row["seeds"], f"{row['positions']['512-4096']:.1f}", _closed(row), _closed_of_texts(row), facts]
        yield [*cells, f"{row['state_bytes'] / 1e6:,.0f}", f"{row['token_flops'] / 1e6:.0f}"]


def linearised_arms() -> Rows:
    """What each choice of the training gives, on novels alone: one choice a row."""
    titles = {
        "window-trained": "window and sinks, trained alike",
        "window-longer": "… on as many tokens as both stages of the defaults read",
        "hedgehog": "`hedgehog`",
        "elu": "`linear`",
        "delta": "`delta`, the rate of β as of the maps",
        "delta-longer": "… longer",
        "delta-transferred": "`delta`, β at ten times the rate, three times the attention transfer at 3e-2",
        "delta-before-rotary": "… and features before rotary positions",
        "delta-forgets": "… and a half-life of 1,024 tokens: the defaults",
        "delta-labels": "`delta` that never forgets, stage 2 on the labels",
        "window-labels": "window and sinks, trained on the labels",
        "window-cache": "window and sinks with a gated cache of each stream",
        "window-cache-unwritten": "… the same, never written",
        "window-cache-few": "window and sinks with gated caches in six upper layers alone",
        "window-remember": "window with memory tokens, which take 32 of its 64",
    }
    heads = ["", "tokens of stage 2", "seeds", "perplexity at 64–512", "512–4,096", "of the gap, %"]
    yield [*heads, "of Great Expectations, Moby Dick, WikiText-2"]
    for title, row in _linearised(titles):
        perplexities = (f"{row['positions'][at]:.1f}" for at in ("64-512", "512-4096"))
        yield [title, f"{row['tokens']:,}", row["seeds"], *perplexities, _closed(row), _closed_of_texts(row)]


def _linearised(titles: dict[str, str]) -> Iterator[tuple[str, Value]]:
    """The title and the row of each arm that has runs."""
    rows = _named(_load("linearised")["rows"])
    return ((title, rows[name]) for name, title in titles.items() if name in rows and rows[name]["seeds"])


def _closed(row: Value) -> str:
    """The share of the gap in percent, with its 95 % interval over seeds."""
    if "gap_closed" not in row:
        return ""
    share = spread([100 * one for one in row["gap_closed"]])
    ends = interval(share)
    return _minus(f"{share.mean:.0f}" + ("" if ends is None else " ({:.0f} to {:.0f})".format(*ends)))


def _closed_of_texts(row: Value) -> str:
    shares = row.get("gap_closed_of_texts", {})
    texts = [one for start in ("great", "moby", "wiki") for text, one in shares.items() if text.startswith(start)]
    return _percents(spread(one).mean for one in texts)


def linearised_told() -> Rows:
    """What memories trained on told facts recall and predict, by arm and seed."""
    titles = {
        "told-window": "window and sinks alone",
        "told-hedgehog": "`hedgehog`",
        "told-delta": "`delta`",
        "told-delta-forgets": "`delta` with a half-life of 1,024 tokens",
        "told-cache": "gated cache of each stream",
        "told-cache-unwritten": "gated cache, never written",
        "told-remember": "memory tokens",
    }
    heads = ["", "seeds", "answers right at the end of training, %", "right of 20 facts told 128", "512", "1,024"]
    yield [*heads, "4,096 tokens ago", "perplexity at 512–4,096"]
    for arm, runs in _load("linearised")["told"].items():
        title = titles[arm.removesuffix("-answers")] + (", answers alone" if arm.endswith("-answers") else "")
        right = _percents(run["training"]["right"] for run in runs)
        told = []
        for distance in (128, 512, 1024, 4096):
            at = [one for run in runs for one in run["recall"]["distances"] if one["distance"] == distance]
            told.append(", ".join(str(sum(one["choice"])) for one in at))
        predicted = [run["predicted"]["positions"]["512-4096"]["perplexity"] for run in runs if "predicted" in run]
        yield [title, len(runs), right, *told, ", ".join(f"{one:.1f}" for one in predicted)]


def hybrids() -> Rows:
    """Of the gap between a window and softmax, what hybrids close without training, by how they are chosen."""
    rows = _load("hybrids_untrained")["rows"]
    heads = ["whole, of 30", "jointly (Great Expectations, Moby Dick, WikiText-2)", "each alone", "attention's mass"]
    yield [*heads, "equal distances", "the last", "ten random draws"]
    for count in sorted({row["whole"] for row in rows}):
        sets = {row["chosen"]: row for row in rows if row["whole"] == count}
        random = [row["gap_closed"] for name, row in sets.items() if name.startswith("random")]
        named = [_percent(sets[name]["gap_closed"]) for name in ("alone", "mass", "equal distances", "last")]
        middle = _percent(sum(random) / len(random))
        drawn = f"{middle} ({_percent(min(random))} to {_percent(max(random))})"
        yield [count, _with_texts(sets["jointly"]), *named, drawn]


def _with_texts(row: Value) -> str:
    return f"{_percent(row['gap_closed'])} ({_percents(row['by_text'])})"


def hybrids_by_head() -> Rows:
    """The same by key head, for as many whole keys and values as some attentions have."""
    rows = _load("hybrids_by_head")["rows"]
    titles = {"attentions jointly": "attentions", "heads alone": "each alone", "heads by gates": "by trained shares"}
    yield ["whole key heads, of 90", *titles.values()]
    for count in sorted({row["whole"] for row in rows}):
        sets = {row["chosen"]: row for row in rows if row["whole"] == count}
        yield [3 * count, *(_with_texts(sets[name]) for name in titles)]


# ---- docs/speed.md ----


def fast_models() -> Rows:
    """Whole models of Transformers, as they come and with mnemos.fast."""
    titles = {"Mamba2": "Mamba-2", "Qwen3Next": "Qwen3-Next", "KimiLinear": "Kimi Linear", "Mamba": "Mamba"}
    titles |= {"Llama": "Llama", "Bert": "BERT", "SmolLM2": "SmolLM2-135M", "ViT": "ViT-S"}
    files, more = [_load(file) for file in ("fast_models", "fast_models_epyc")], _load("fast_models_more")
    rows = [(row, file) for model in titles for file in files for row in file["rows"] if row["model"] == model]
    yield ["model", "processor", "training step, ms", "prefill, ms", "one token, ms"]
    for row, file in [*rows, *((row, more) for row in more["rows"])]:
        usual = (row["tokens"] == 1024 and row["width"] == 64) or row["model"] in ("SmolLM2", "ViT")
        cells = [titles[row["model"]] + ("" if usual else f", {row['tokens']:,} tokens, heads of {row['width']}")]
        cells.append(_processor(file))
        for part, digits in {"training step": 0, "prefill": 1, "token, batch 1": 1}.items():
            ms, cell = row.get(part, {}).get("ms", {}), ""
            if "transformers" in ms:
                times = row[part]["times as fast"]
                undecided = f" ({times['low']:.2f} to {times['high']:.2f})" if times["low"] < 1 < times["high"] else ""
                cell = f"{ms['transformers']:,.{digits}f} → {ms['mnemos']:,.{digits}f}: "
                cell += f"**{times['median']:.1f}**{undecided}"
            cells.append(cell)
        yield cells


def linear_speed() -> Rows:
    """Linear attention beside the paper's own library, forward and backward."""
    file = _load("linear_attention")
    yield [f"tokens ({_processor(file)})", "heads of", "ms", "fast-transformers, times", "PyTorch in chunks, times"]
    for row in file["rows"]:
        times = _times(row["of native's time"], ("fast-transformers", "chunked"))
        yield [f"{row['tokens']:,}", row["width"], f"{row['ms']['native']:.1f}", *times]


def delta_gradients() -> Rows:
    """Forward and backward of the delta rule, beside transformers and linear attention."""
    titles = {"gradients": "gated delta", "channels": "gated delta, decay per channel", "decayed": "Mamba-2"}
    yield ["computation", "heads of", "tokens", "ms", "transformers, times", "beside linear attention, times"]
    for part, title in titles.items():
        for row in _load("delta")[part]["rows"]:
            (theirs,), linear = _times(row["of ours"], ["transformers"]), row["of ours"].get("linear attention")
            times = [theirs or "not timed", f"{1 / linear['median']:.1f}" if linear else ""]
            yield [title, row["width"], f"{row['tokens']:,}", f"{row['ms']['ours']:.0f}", *times]


def delta_forward() -> Rows:
    """Forward alone of the delta rule, beside fused operators of others, and one token."""
    peers = ("com.microsoft.GatedDeltaNet", "com.microsoft.LinearAttention", "zentorch", "transformers")
    titles = [f"{name}, times" for name in ("`GatedDeltaNet`", "`LinearAttention`", "zentorch", "transformers")]
    yield ["call", "processor", "heads of", "ms", *titles]
    for file in map(_load, ("delta", "delta_epyc")):
        for part in [part for part in ("forward", "step") if part in file]:
            for row in file[part]["rows"]:
                if part == "forward":
                    title = f"{row['tokens']:,} tokens"
                else:
                    title = f"one token, batch {row['batch']}, {row['heads']} heads"
                    title += f", {row['key_heads']} of keys" if row["key_heads"] != row["heads"] else ""
                times = _times(row["of ours"], peers, ".2f")
                yield [title, _processor(file[part]), row["width"], f"{row['ms']['ours']:.3g}", *times]


def transformer_speed() -> Rows:
    """The softmax Transformer beside encoders of the same weights."""
    files = [_load(file) for file in ("transformer_speed_xeon", "transformer_speed")]
    heads = ["rows × tokens, width, layers", "processor", "", "mnemos, ms", "torch.nn", "transformers"]
    yield [*heads, "times the faster"]
    pairs = zip(*([(row, file) for row in file["rows"]] for file in files), strict=True)
    for row, file in (pair for both in pairs for pair in both):
        shape, ms = file["shapes"][row["shape"]], row["ms"]
        sizes = f"{shape['batch']} × {shape['tokens']:,}, {shape['dim']}, {shape['layers']}"
        times = (ms[name] for name in ("mnemos", "torch.nn.TransformerEncoder", "transformers ViT"))
        cells = [_processor(file), "training step" if row["mode"] == "step" else "forward"]
        cells += [f"{x:,.{int(x < 100)}f}" for x in times]
        yield [sizes, *cells, f"**{1 / row['ratio to it']['median']:.2f}**"]


def convolutions() -> Rows:
    """The short convolution beside PyTorch."""
    rows = {(row["tokens"], row["channels"], row["gradients"]): row for row in _load("delta")["convolution"]["rows"]}
    yield ["tokens", "channels", "forward, ms", "PyTorch, times", "with gradients, ms", "PyTorch, times"]
    for tokens, channels in sorted({key[:2] for key in rows}):
        cells = [f"{tokens:,}", f"{channels:,}"]
        for row in (rows[tokens, channels, False], rows.get((tokens, channels, True))):
            cells += [f"{row['ms']['ours']:.3g}", f"{row['of ours']['PyTorch']['median']:.1f}"] if row else ["", ""]
        yield cells


def decoding_speed() -> Rows:
    """A token of the papers' model by the fused step."""
    file = _load("decoding")
    peers = {
        "plain": "the model, unfused",
        "fast-transformers": "fast-transformers",
        "softmax, 784 cached": "softmax, 784 keys",
    }
    yield [f"rows ({_processor(file)})", "fused step, ms", *(f"{name}, times" for name in peers.values())]
    for row in file["token"]:
        yield [row["batch"], f"{row['ms']['fused']:.2f}", *_times(row["of fused's time"], peers)]


def translation_speed() -> Rows:
    """A beam search beside the peers' on the same weights."""
    heads = ["sentences", "width", "processor", "ours, ms", "Transformers, times", "CTranslate2, float32, times"]
    yield [*heads, "CTranslate2, int8, times"]
    for sentences, shape, width in ((1, "small", 128), (1, "iwslt", 512), (32, "small", 128), (32, "iwslt", 512)):
        # one sentence was measured again on the Xeon, when the kernel read a beam of five in one pass
        for name in ("translation_one_sentence" if sentences == 1 else "translation_speed", "translation_speed_amd"):
            file = _load(name)
            row = file["rows"][f"{shape}, decode, batch {sentences}"]
            peers = (row.get(peer) for peer in ("transformers", "ctranslate2 float32", "ctranslate2 int8"))
            times = (f"{peer['ratio']:.1f}" if peer else "" for peer in peers)
            yield [sentences, width, _processor(file), f"{1000 * row['mnemos']['seconds']:,.0f}", *times]


def linearised_speed() -> Rows:
    """Tokens a second and bytes of linearised decoders beside their own softmax."""
    rows = _load("linearised_speed")["rows"]
    keys = "part", "rank", "rotary", "context"
    softmax = {tuple(row[key] for key in keys): row for row in rows if row["model"] == "softmax"}
    heads = ["", "processor", "state", "rank", "tokens of context", "softmax, tokens a second", "linearised"]
    yield [*heads, "times as fast", "softmax, MB of cache", "linearised"]
    for own in sorted(rows, key=lambda row: (row["part"], row["cpu"], row["model"], row["context"])):
        other = softmax.get(tuple(own[key] for key in keys))
        if own is other or other is None:
            continue
        state = f"`{own['model']}`" + (", `rotary=True`" if own["rotary"] else "")
        cells = [own["part"], own["cpu"].removesuffix(" Processor").replace("(R)", ""), state, own["rank"]]
        speeds = (f"{row['tokens_per_second']:,.1f}" for row in (other, own))
        times = "{median:.2f} ({low:.2f} to {high:.2f})".format(**own["times_softmax"])
        sizes = (f"{row['state_bytes'] / 1e6:,.1f}" for row in (other, own))
        yield [*cells, f"{own['context']:,}", *speeds, times, *sizes]


def rollout_cost() -> Rows:
    """Gradients through segments of a Mamba, by four ways."""
    file = _load("rollouts")
    ways = ("back-propagation", "torch.utils.checkpoint", "replay")
    heads = [f"{f'`{way}`' if '.' in way else way}: {unit}" for way in ways for unit in ("MiB", "s")]
    yield [f"segments of {file['segment']} ({_processor(file)})", *heads]
    for count, row in file["segments"].items():
        costs = ((f"{row[way]['peak_bytes'] / 2**20:.0f}", f"{row[way]['seconds']:.1f}") for way in ways)
        yield [count, *(cell for both in costs for cell in both)]


# ---- the pages ----


_PUBLIC = {name.replace("_", "-"): one for name, one in globals().items() if name[0] != "_"}
ROWS = {name: one for name, one in _PUBLIC.items() if inspect.isgeneratorfunction(one)}
ROWS |= {f"text-{kind}": functools.partial(_texts, f"text_{kind}") for kind in ("state", "forgets")}
CLAIMS = {f"claims-{page.split('-')[0]}": functools.partial(_claims_of, name) for name, page, _ in _PAPERS}
CLAIMS["claims"] = claims


def render(text: str) -> str:
    """A page with its tables written anew."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name not in ROWS and name not in CLAIMS:
            sys.exit(f"expected a table of {', '.join([*ROWS, *CLAIMS])}, found {name}")
        made = CLAIMS[name]() if name in CLAIMS else _table(ROWS[name]())
        return f"<!--table {name}-->\n{made}<!--/table-->"

    return TABLE.sub(table, text)


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or with `--check` compare them; 1 where one is another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page and its table differ")
    check, failed = parser.parse_args(argv).check, False
    pages = {path: render(path.read_text()) for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
    for path, made in {**pages, log_index.PAGE: log_index.index()}.items():
        found = path.read_text()
        if found != made and check:
            failed = True
            lines = found.splitlines(), made.splitlines()
            names = str(path.relative_to(ROOT)), "what `make numbers` writes"
            print(*difflib.unified_diff(*lines, *names, n=0, lineterm=""), sep="\n", file=sys.stderr)
        elif found != made:
            path.write_text(made)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
