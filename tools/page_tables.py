"""The tables of the pages that are made from results/*.json as a whole; tools/page_numbers.py writes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scipy.stats import t as student

ROOT = Path(__file__).parents[1]
KIB = 2.0**10
Value = Any  # what JSON holds


def what_helped() -> str:
    """The table of README and docs/results.md: a gated cache beside its baselines, mean and spread over the seeds."""
    lines = [
        "| test accuracy | no cache | equal parameters | cached | cached, never written | the memory adds |\n",
        "|---|---|---|---|---|---|\n",
    ]
    for title, stem, file in (
        ("MNIST, ViT", "mnist-vit", "mnist_vit"),
        ("digits 8 × 8, ViT", "digits-vit", "digits_vit"),
        ("540 photos, ViT", "photos-vit", "photos_vit"),
        ("short ListOps", "demo", LISTOPS),
    ):
        whole = _load(file)
        rows = {row["name"]: row for row in whole["rows"]}
        cached = rows[f"{stem}-cached"]
        unwritten = rows.get(f"{stem}-cached-unwritten", whole.get("never_written"))
        cells = [_spread(rows[stem]), _spread(rows[f"{stem}-wider"]), _spread(cached)]
        cells += ["not run", "not known"] if unwritten is None else [_spread(unwritten), _added(cached, unwritten)]
        lines.append(f"| {title} | " + " | ".join(cells) + " |\n")
    (recall,) = (entry for entry in _load("bench_memory")["benchmarks"] if entry["name"] == "mqar")
    lines.append(f"| recall of pairs (MQAR, small), cache per stream | {_cache_per_stream(recall)} |\n")
    return "".join(lines)


def stream_caches() -> str:
    """The table of docs/results.md: what a written cache per stream adds, in every default benchmark."""
    lines = ["| test accuracy, cache per stream | no cache | cached | cached, never written | the memory adds |\n"]
    lines.append("|---|---|---|---|---|\n")
    lines += [
        f"| `{entry['name']}` | {_cache_per_stream(entry).replace('not run | ', '')} |\n"
        for entry in _load("bench_memory")["benchmarks"]
    ]
    return "".join(lines)


def _cache_per_stream(entry: Value) -> str:
    """The cells of a benchmark: no cache, equal parameters, cached, never written, and what the memory adds."""
    window, cached, unwritten = (_row(entry, name) for name in ("window", "gated-cache", "gated-cache-unwritten"))
    cells = [_spread(window), "not run", _spread(cached), _spread(unwritten), _added(cached, unwritten)]
    return " | ".join(cells)


# The comparison of five seeds has no never-written baseline; a later one has.
LISTOPS = "demo_unwritten" if (ROOT / "results/demo_unwritten.json").exists() else "demo_five_seeds"


def _spread(row: Value) -> str:
    return f"{row['mean']:.3f} ± {row['std']:.3f}" + ("" if row["seeds"] == 5 else f" ({row['seeds']} seeds)")


def _added(a: Value, b: Value) -> str:
    """How much higher the mean of `a` is, and the 95 % interval of the difference (Welch)."""
    parts = [row["std"] ** 2 / row["seeds"] for row in (a, b)]
    freedom = sum(parts) ** 2 / sum(part**2 / (row["seeds"] - 1) for part, row in zip(parts, (a, b), strict=True))
    half = float(student.ppf(0.975, freedom)) * sum(parts) ** 0.5
    more = a["mean"] - b["mean"]
    return "{} ({} to {})".format(*(f"{x:+.3f}".replace("-", "−") for x in (more, more - half, more + half)))


def which_memory() -> str:
    """The table of docs/choosing.md: every memory's scores, and its state and seconds in the first benchmark."""
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


def text_state() -> str:
    """The table of docs/choosing.md: memories of one size on books, the best first."""
    lines = ["| memory | bits per byte | minus Transformer-XL | updates | state, KiB |\n", "|---|---|---|---|---|\n"]
    for row in sorted(_load("text_state")["rows"], key=lambda row: row["mean"]):
        against = row.get("against")
        gain = ""
        if against is not None:
            ends = (against["difference"], *against["interval"])
            gain = "{} ({} to {})".format(*(f"{x:+.3f}".replace("-", "−") for x in ends))
        cells = [row["name"].removeprefix("text-state-"), f"{row['mean']:.3f} ± {row['std']:.3f}", gain]
        cells += [f"{row['steps']:,.0f}", f"{row['state_bytes'] / KIB:.1f}"]
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


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
    "what-helped": what_helped,
    "stream-caches": stream_caches,
    "which-memory": which_memory,
    "text-state": text_state,
}
