"""What does a gated cache give an encoder that classifies texts longer than it reads? Ten novels, by passage.

    python benchmarks/encoder_classes.py --host FOLDER --books FOLDER --out FOLDER [--seeds 5] [--precision bf16-mixed]
                                         [--families texts-last-cached] [--result FILE.json]

A passage has 512 tokens of the host, a sentence encoder (all-MiniLM-L6-v2), which reads them in four segments of 128.
The class is the novel, one of ten. Proper names and typography are hidden (`plain`, `hide_names`), so that what tells
the novels apart is in style and matter, and spread over the passage. Training passages are of the beginnings of the
novels, validation and test passages of their ends. The host's embeddings and lower four layers keep their weights.

The recipes are `texts-last-cached` and `texts-cached` (or one of them, by --families), each with the one without a
cache and the two baselines of `mnemos compare --baselines`. All arms have equal updates of equal batches and one
learning rate: the one at which `texts` and `texts-cached` together have the best accuracy on the validation split, one
run each. The test split is scored once. A bag of word pieces (TF-IDF, logistic regression, C by the validation split)
reads all training passages.

books: a folder with novels and books.json, {file: {"body_start", "body_end"}} in bytes. The runs are in OUT, and the
same command continues an interrupted one; with fewer seeds it makes a part of it.
"""

import argparse
import gzip
import json
import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mnemos import registry
from mnemos.atomic import write_text
from mnemos.lab.compare.compare import compare
from mnemos.lab.compare.significance import spread
from mnemos.lab.papers.experiments import power, seeds_needed, welch_holm
from mnemos.lab.run import provenance
from mnemos.lab.run.files import Result
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.recipe_fields import with_parts
from mnemos.lab.tasks.text_classes import TextClassesTask

# Characters of a novel; the last ones may be notes.
STRETCHES = {"train": (0, 400_000), "valid": (-160_000, -115_000), "test": (-110_000, -20_000)}
WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*")
SHARE = 0.5  # of the novels that have a capitalised word in small letters too; below it the word counts as a name
FROZEN, STEPS, ROWS = 4, 100, 8
RATES = (3e-4, 1e-3, 3e-3)
EFFECT = 0.02  # the difference of accuracies whose power is given
# The arm with a cache, and its controls. The last of the first family is the plain way to read long texts.
FAMILIES = {
    "texts-last-cached": ("texts-last", "texts-last-cached-unwritten", "texts-last-cached-wider", "texts"),
    "texts-cached": ("texts", "texts-cached-unwritten", "texts-cached-wider"),
}


def bodies(books: Path) -> dict[str, str]:
    """The novels' own text by name."""
    found = {}
    for file, about in json.loads((books / "books.json").read_text()).items():
        with gzip.open(books / file) as opened:
            body = opened.read()[about["body_start"] : about["body_end"]]
        found[Path(file).name.split(".")[0]] = body.decode()
    return found


def plain(text: str) -> str:
    """A text without accents, quotation marks, brackets and dashes, which the editions set in different ways."""
    text = re.sub(r"[“”\"‘_*\[\]()—–-]", " ", text).replace("’", "'")
    text = re.sub(r"(?<![A-Za-z])'|'(?![A-Za-z])", " ", text)
    return " ".join("".join(c for c in unicodedata.normalize("NFKD", text) if ord(c) < 128).split())


def hide_names(texts: dict[str, str]) -> dict[str, str]:
    """The texts with Name for capitalised words that fewer than `SHARE` of them also have in small letters."""
    own = [set(WORD.findall(text)) for text in texts.values()]
    common = {
        word for word, count in Counter(word for words in own for word in words).items() if count >= SHARE * len(own)
    }

    def hidden(match: re.Match) -> str:
        word = match.group()
        if word[0].islower() or word.split("'")[0] == "I":
            return word
        return word if word.lower() in common else "Name"

    return {name: WORD.sub(hidden, text) for name, text in texts.items()}


def prepare(books: Path, folder: Path) -> Path:
    """Write the texts as FOLDER/SPLIT/NOVEL/text.txt, unless they are there."""
    if not folder.is_dir():
        for name, text in hide_names({name: plain(text) for name, text in bodies(books).items()}).items():
            for split, (first, end) in STRETCHES.items():
                place = folder / split / name
                place.mkdir(parents=True)
                (place / "text.txt").write_text(text[first:end])
    return folder


def recipes(host: str, texts: Path, names: Sequence[str], rate: float, precision: str) -> list[Recipe]:
    """The recipes with this host, text, learning rate and `train.precision`."""
    made = []
    for name in names:
        one, _ = with_parts(registry.load("recipe", name)(), ["--model", host])
        train: Any = replace(one.train, steps=STEPS, batch_size=ROWS, eval_every=STEPS, checkpoint_every=STEPS)
        train = replace(train, threads=1, precision=precision)
        model: Any = replace(one.model, frozen=FROZEN)  # type: ignore[call-arg]
        data: Any = replace(one.data, path=str(texts))  # type: ignore[call-arg]
        made.append(replace(one, model=model, data=data, train=train, optim=replace(one.optim, lr=rate)))
    return made


def chosen_rate(host: str, texts: Path, out: Path, precision: str) -> tuple[float, dict[str, dict[str, float]]]:
    """The learning rate, and the validation accuracies it was chosen by, {recipe: {rate: accuracy}}."""
    given = recipes(host, texts, ["texts", "texts-cached"], RATES[0], precision)
    rows = compare(given, out / "rates", rates=RATES)["rows"]
    scores = {row["name"]: {f"{rate:g}": score for rate, score in row["rates"]} for row in rows}
    return max(RATES, key=lambda rate: sum(one[f"{rate:g}"] for one in scores.values())), scores


def bag_of_pieces(task: TextClassesTask) -> dict[str, float]:
    """The accuracies of a bag of word pieces."""
    from scipy.sparse import csr_matrix
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    batches = {"train": task.train_batch(0, task.size("train"), 0)}  # one epoch: each row once
    batches |= {split: next(task.batches(split, task.size(split))) for split in ("valid", "test")}
    counts = {}
    for split, batch in batches.items():
        rows, columns = np.nonzero(np.ones(batch.inputs.shape) if batch.mask is None else batch.mask.numpy())
        tokens = batch.inputs.numpy()[rows, columns]
        counts[split] = csr_matrix((np.ones(len(rows)), (rows, tokens)), (len(batch.inputs), task.vocab_size))
    scores: dict[float, dict[str, float]] = {}
    for c in (1.0, 10.0, 100.0):
        model = make_pipeline(TfidfTransformer(sublinear_tf=True), LogisticRegression(C=c, max_iter=2000))
        model.fit(counts["train"], batches["train"].targets.numpy())
        scores[c] = {split: model.score(counts[split], batches[split].targets.numpy()) for split in ("valid", "test")}
    best = max(scores, key=lambda c: scores[c]["valid"])
    return {"C": best, **scores[best]}


def difference_rows(accuracies: dict[str, list[float]], arm: str, controls: Sequence[str]) -> list[dict[str, Any]]:
    """The arm minus each of its controls, p corrected over them by Holm, and the power for `EFFECT`."""
    scores = {name: spread(values) for name, values in accuracies.items()}
    rows = []
    tests = welch_holm((scores[arm], scores[name]) for name in controls)
    for name, found in zip(controls, tests, strict=True):
        had = power(EFFECT, scores[arm], scores[name], scores[arm].seeds)
        rows.append(
            {"minus": name, "difference": found.difference, "interval": found.interval, "p": found.p}
            | {"p_holm": found.p_holm, "shown": found.finding(True), "power": had}
            | {"seeds_for_.8": seeds_needed(EFFECT, scores[arm], scores[name])}
        )
    return rows


def main() -> None:
    """Choose the rate, train all arms, and print or write the tables."""
    parser = argparse.ArgumentParser(description="A gated cache in an encoder that classifies long texts")
    parser.add_argument("--host", required=True, help="hf:NAME, or the folder of a saved encoder")
    parser.add_argument("--books", type=Path, required=True, help="the folder of the novels")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the texts and runs")
    parser.add_argument("--seeds", type=int, default=5, help="0: choose the rate alone")
    parser.add_argument("--precision", default="32-true", help="of the training, as `train.precision`")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES], help="cached recipes (all)")
    parser.add_argument("--result", type=Path, help="a JSON file of the tables")
    options = parser.parse_args()
    texts = prepare(options.books, options.out / "texts")
    rate, chosen = chosen_rate(options.host, texts, options.out, options.precision)
    print(f"learning rate {rate:g}, of", chosen, flush=True)
    if not options.seeds:
        return
    wanted = {name for arm in options.families for name in (arm, *FAMILIES[arm])}
    names = [name for name in ("texts-last", "texts-last-cached", "texts", "texts-cached") if name in wanted]
    given = recipes(options.host, texts, names, rate, options.precision)
    found = compare(given, options.out / "runs", options.seeds, baselines=True)
    results = {
        name: [Result.read(options.out / "runs" / place) for place in places] for name, places in found["runs"].items()
    }
    accuracies = {name: [one.score("accuracy") for one in every] for name, every in results.items()}
    bag = bag_of_pieces(given[0].data.build())
    report = {
        "arms": {
            row["name"]: {
                "test": {"mean": row["mean"], "std": row["std"]},
                "seeds": accuracies[row["name"]],
                "valid": statistics.fmean(one.valid["accuracy"] for one in results[row["name"]]),
                "parameters": row["parameters"],
                "train_tflop": row["train_flops"] and row["train_flops"] / 1e12,
                "minutes": row["seconds"] / 60,
                "controls": [one.controls for one in results[row["name"]]],
            }
            for row in found["rows"]
        },
        "differences": {
            arm: difference_rows(accuracies, arm, controls)
            for arm, controls in FAMILIES.items()
            if arm in options.families
        },
        "effect": EFFECT,
        "chance": found["majority"],
        "bag of word pieces": bag,
        "rate": rate,
        "rates": chosen,
        "updates": STEPS,
        "rows": ROWS,
        "precision": options.precision,
        "scored": {split: given[0].data.build().size(split) for split in ("train", "valid", "test")},
        "provenance": provenance.shared([options.out / "runs" / p for every in found["runs"].values() for p in every]),
    }
    for name, arm in report["arms"].items():
        print(
            f"{name:30} {arm['test']['mean']:.3f} ± {arm['test']['std'] or 0:.3f}", *(f"{x:.3f}" for x in arm["seeds"])
        )
    print("bag of word pieces", bag)
    for arm, rows in report["differences"].items():
        for row in rows:
            print(arm, row)
    if options.result:
        write_text(options.result, json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
