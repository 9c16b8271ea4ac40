"""Tables 1 and 2, images byte by byte and language modelling: costs and small models; and the recall of a fact."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import ModelConfig
from mnemos.lab.compare import significance
from mnemos.lab.measure.flops import count_flops, forward_flops
from mnemos.lab.measure.gradients import state_bytes
from mnemos.lab.measure.timing import race
from mnemos.lab.run.recipe import Recipe
from mnemos.models.transformer import TransformerConfig
from mnemos.types import InputError, State

from ..claim import Claim
from ..findings import Finding, Table, spread
from ..reproduce import Options
from ..small_runs import Trained, shape, task, train_language_models
from .recipes import (
    LANGUAGE,
    PICTURES,
    RECALL,
    RECALL_MODEL,
    SMALL_LANGUAGE,
    ImageSizes,
    LanguageSizes,
    language_recipe,
    language_variant,
    picture_recipe,
    picture_variant,
    recall_memformer,
)


def table1(claim: Claim, options: Options) -> Finding:
    """Table 1: FLOPs of the paper's models; perplexities of small models on MNIST or scikit-learn's digits."""
    found = Finding([], [_PICTURES_AT_PAPER])
    if not options.recipes_only:
        found.tables.append(_picture_costs(claim))
        found.notes.insert(0, _PICTURES_COUNTED)
        data = task(options)[0]
        recipes = {name: _picture_recipe(options, name) for name in PICTURES}
        title = f"Perplexity per byte of {data}, small models"
        trained = _perplexities(found, claim, options, f"table1-{data}", recipes, title, "GFLOP")
        pairs = [(ABLATED if name.startswith(_ABLATIONS) else WHOLE, name) for name in recipes]
        _differences(found, trained, pairs)
    return found


_PICTURES_COUNTED = (
    "GFLOP: a multiply-add counts as 2. A picture is read from its first byte, with empty memories. The paper says "
    "neither how it counts nor how long Memformer's segments are; here a segment is a row of 28 bytes. No length gives "
    "the paper's FLOPs of all Memformers."
)
_PICTURES_AT_PAPER = (
    "At the paper's size: mnemos train RECIPE --data.images.path MNIST, where RECIPE is one of "
    f"{', '.join(f'mnist-{ending}' for ending in PICTURES.values())}."
)


# The rows of Table 1 with which others are compared: ablations, which begin so, with that of 2 + 6 layers.
WHOLE, ABLATED = "Memformer 4+8", "Memformer 2+6 memory=64"
_ABLATIONS = ("Memformer 2+6", "w/o", "temperature")


def _picture_costs(claim: Claim) -> Table:
    size = ImageSizes()
    table = Table("The paper's models: one picture of 784 bytes", ["", "parameters", "GFLOP", "paper GFLOP"])
    for name in PICTURES:
        model, rollout = picture_variant(name, size)
        # Memformer divides a picture into segments itself, with the same operations.
        segment = rollout.segment_length if model.name == "transformer" else 0
        theirs = claim.values[name][0] if name in claim.values else None
        table.add(name, *_cost(model, size.length, segment), theirs)
    return table


def _cost(config: ModelConfig, length: int, segment: int) -> tuple[int, float]:
    """Parameters, and GFLOP of a forward pass of `length` tokens, from shapes only; an LSTM must run to be counted."""
    with torch.device("cpu" if config.name == "lstm" else "meta"):
        model, tokens = config.build().eval(), torch.zeros(1, length, dtype=torch.int64)
        return sum(p.numel() for p in model.parameters()), forward_flops(model, tokens, segment=segment) / 1e9


def _picture_recipe(options: Options, name: str) -> Recipe:
    data, fields = task(options)
    if data == "cifar":
        raise InputError(
            f"--data {options.data}: expected a folder with MNIST, found no MNIST files; omit --data to use digits"
        )
    found = picture_recipe(data, name)
    pixels: Any = found.data
    return replace(found, data=replace(pixels, images=replace(pixels.images, **fields)))


def _perplexities(
    found: Finding, claim: Claim, options: Options, runs: str, recipes: Mapping[str, Recipe], title: str, flops: str
) -> Trained:
    """Train the small models of a table's rows, in a folder named after `runs`; add their table and order."""
    trained = train_language_models(found, options, runs, recipes)
    columns = ["", "model here", "parameters", "perplexity", flops, "seconds of training", "paper perplexity"]
    table = Table(title, columns)
    for name, recipe in recipes.items():
        row = trained.rows[name]
        theirs = claim.values[name][1] if name in claim.values else None
        count, flop = row["parameters"], row["flops"] / 1e9
        table.add(name, shape(recipe), count, trained.perplexity(name), flop, row["seconds"], theirs)
    found.tables.append(table)
    found.notes.append(trained.order(claim.values, 1))
    return trained


def _differences(found: Finding, trained: Trained, pairs: Sequence[tuple[str, str]]) -> None:
    """Add a table of the differences in perplexity of pairs of two rows, first minus second; nothing for one seed."""
    pairs = [(one, other) for one, other in pairs if one != other]
    scores = {name: significance.spread(values) for name, values in trained.perplexities.items()}
    if any(score.seeds < 2 for score in scores.values()):
        return
    table = Table("Differences of perplexity, 95 %; p by Holm over the table", ["", "difference", "from", "to", "p"])
    tested = significance.correct([significance.welch(scores[one], scores[other]) for one, other in pairs])
    for (one, other), each in zip(pairs, tested, strict=True):
        low, high = each.interval or (None, None)
        p = each.p_holm if math.isfinite(each.p_holm) else None
        table.add(f"{one} minus {other}", each.difference, low, high, p)
    found.tables.append(table)


PAPER = LanguageSizes()._replace(dropout=0.0)
ROUNDS = 3
SPEED = 3.2  # the paper's ratio of inference speeds
_XL_ROWS = "Transformer-XL base memory="
COMPARED = {"Transformer-XL": "Transformer-XL base memory=1024", "Memformer": "Memformer 4+16"}


def table2(claim: Claim, options: Options) -> Finding:
    """Table 2: FLOPs of the paper's models, inference with two of them, and perplexities of small models."""
    found = Finding([], [_TEXT_AT_PAPER])
    if not options.recipes_only:
        costs = _text_costs(claim)
        found.tables += [costs, _inference(claim)]
        found.notes = [_TEXT_COUNTED, *_per_token_of_memory(costs), *found.notes, _TIMED]
        path = None if options.data is None else str(options.data)
        title = (
            f"Perplexity per byte of {path or 'the standard library'}, models of width {SMALL_LANGUAGE.dim}, segments "
            f"of {SMALL_LANGUAGE.segment}"
        )
        recipes = {name: language_recipe(name, path) for name in LANGUAGE}
        trained = _perplexities(found, claim, options, "table2-text", recipes, title, "GFLOP, first segment")
        _differences(
            found, trained, [(COMPARED["Memformer"], name) for name in recipes if name != COMPARED["Memformer"]]
        )
        found.notes.append("The paper's perplexities are per word, on WikiText-103, medians of three runs.")
    return found


_TEXT_COUNTED = (
    "GFLOP per segment of 128 tokens, with full memories; a multiply-add counts as 2. The vocabulary is 256 bytes, so "
    "the softmax hardly counts. The paper uses words, and does not say whether it counts the softmax over them."
)
_TEXT_AT_PAPER = (
    "At the paper's size, in words: mnemos train wikitext-memformer (wikitext-xl, wikitext-compressive) --data.path "
    "WIKITEXT-103."
)
_TIMED = (
    "Batch size 1, not trained (weights do not change the time). Generated: 128 tokens one by one; the encoder runs "
    "once for them. Read: one segment per call. State: bytes per stream at the start of a segment, and the maximum; "
    "within a segment Memformer also keeps the keys and values of its decoder. The paper gives no times for its 3.2, "
    "which is near the ratios of its FLOPs, 3.1 to Transformer-XL with a memory of 1,024 and 3.2 to the Compressive "
    "Transformer. Its 8.1 times less memory is of Figure 5."
)


def _text_costs(claim: Claim) -> Table:
    table = Table("The paper's models: one segment of text", ["", "parameters", "GFLOP", "paper GFLOP"])
    for name in LANGUAGE:
        with torch.device("meta"):
            model = language_variant(name, PAPER)[0].build().eval()
            table.add(name, sum(p.numel() for p in model.parameters()), _gflop(model), claim.values[name][0])
    return table


def _per_token_of_memory(costs: Table) -> list[str]:
    """A note on what a token of Transformer-XL's memory costs, here and in the paper: the slope over its rows.

    There is no note for fewer than two rows.
    """
    rows = {int(str(row[0]).removeprefix(_XL_ROWS)): row for row in costs.rows if str(row[0]).startswith(_XL_ROWS)}
    if len(rows) < 2:
        return []
    least, most = min(rows), max(rows)
    slopes = [(float(rows[most][i] or 0) - float(rows[least][i] or 0)) / (most - least) for i in (2, 3)]
    ours, theirs = (1e3 * slope for slope in slopes)
    return [
        f"Each token of Transformer-XL's memory costs {ours:.0f} MFLOP here and {theirs:.0f} in the paper, "
        f"{theirs / ours:.1f} times as many; so the rows with long memories differ most, the Compressive Transformer "
        "like Transformer-XL with as many tokens and slots. The paper does not say what it counts."
    ]


def _gflop(model: nn.Module) -> float:
    """GFLOP of one segment in the middle of a stream, computed from shapes without running the model."""
    segment = torch.zeros(1, PAPER.segment, dtype=torch.int64, device="meta")
    with torch.no_grad():
        attention = getattr(model.config, "attention", None)
        if memory := getattr(attention, "memory", 0):
            memory += getattr(attention, "compressed", 0) * getattr(attention, "ratio", 0)  # tokens until it is full
            count = -(-memory // PAPER.segment)
            _, state = model(segment.repeat(1, count))
            return count_flops(partial(model, segment, state)) / 1e9
        # The cost of the second of two segments: the first one also encodes the start token.
        two = torch.cat([segment, segment], 1)
        return (count_flops(partial(model, two)) - count_flops(partial(model, segment))) / 1e9


def _inference(claim: Claim) -> Table:
    """Time and bytes of two models of equal width, with a memory of 1,024 tokens or slots."""
    width, length = PAPER.dim, PAPER.segment
    table = Table(
        f"Inference at width {width}, memory {1024 // PAPER.length_divisor:,}, {torch.get_num_threads()} threads",
        ["", "ms per generated token", "ms per read token", "GFLOP per segment", "state MiB", "maximum state MiB"],
    )
    tokens = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0))
    runs: dict[str, Callable[[], object]] = {}
    found = {}
    for name, row in COMPARED.items():
        torch.manual_seed(0)
        model = language_variant(row, PAPER)[0].build().eval()
        with torch.inference_mode():
            state: State = None
            for _ in range(1024 // PAPER.length_divisor // length):
                _, state = model(tokens, state)
        runs[f"{name}, generated"] = partial(_generate, model, tokens, state)
        runs[f"{name}, read"] = partial(_read, model, tokens, state)
        with torch.device("meta"):
            flops = _gflop(language_variant(row, PAPER)[0].build().eval())
        found[name] = [flops, state_bytes(state) / 2**20, _generate(model, tokens, state) / 2**20]
    times = {name: 1e3 * statistics.median(each) / length for name, each in race(runs, ROUNDS).items()}
    for name in COMPARED:
        table.add(name, times[f"{name}, generated"], times[f"{name}, read"], *found[name])
    xl, ours = table.rows
    ratios = [a / b for a, b in zip(xl, ours, strict=True) if isinstance(a, float) and isinstance(b, float)]
    table.add("Transformer-XL / Memformer", *ratios)
    theirs = [claim.values[row][0] for row in COMPARED.values()]
    table.add("paper's ratio", SPEED, SPEED, theirs[0] / theirs[1], None, None)
    return table


@torch.inference_mode()
def _generate(model: nn.Module, tokens: Tensor, state: State) -> int:
    """Process the tokens one by one; returns the maximum number of bytes of the state."""
    most = 0
    for token in tokens.T:
        _, state = model(token[None], state)
        most = max(most, state_bytes(state))
    return most


@torch.inference_mode()
def _read(model: nn.Module, tokens: Tensor, state: State) -> tuple[Tensor, State]:
    logits, state = model(tokens, state)
    return logits, state


def variants() -> Mapping[str, Recipe]:
    """Memformer with replay, the same with the paper's settings, with a horizon of 1, and softmax over two segments.

    With preset="paper" the decoder does not read the slots: the value must pass from them through the encoding of a
    segment before the question's.
    """
    base = recall_memformer()
    found: Any = base.model
    segment = base.train.rollout.segment_length
    windowed: ModelConfig = TransformerConfig.classic(
        vocab_size=0,
        dim=found.dim,
        layers=found.encoder_layers + found.decoder_layers,
        num_heads=found.num_heads,
        mlp=found.mlp,
        max_length=0,
        dropout=found.dropout,
        attention=SoftmaxConfig(window=2 * segment),
    )
    truncated = replace(base.train, rollout=replace(base.train.rollout, horizon=1))
    paper = replace(found, preset="paper", decoder_reads=False)
    return {
        "Memformer, replay": base,
        "Memformer as in the paper, replay": replace(base, name=f"{base.name}-paper", model=paper),
        "Memformer, horizon 1": replace(base, name=f"{base.name}-horizon-1", train=truncated),
        f"softmax, window {2 * segment}": replace(base, name="recall-softmax", model=windowed),
    }


def recall(claim: Claim, options: Options) -> Finding:
    """The accuracy at the full distance."""
    found = Finding(
        [],
        [
            "To train one model: mnemos train recall-memformer. Its decoder reads the slots. The decoder of "
            'preset="paper" does not: --model.preset paper --model.decoder-reads False.'
        ],
    )
    if options.recipes_only:
        return found
    recipes = variants()
    trained = train_language_models(found, options, "recall", recipes)
    table = Table(
        f"Accuracy {RECALL.distance:,} tokens ({RECALL.distance // RECALL_MODEL.segment} segments) after the fact",
        ["", "model here", "right, %", "GFLOP per sequence", "seconds of training"],
    )
    for name, variant in recipes.items():
        row = trained.rows[name]
        accuracy = spread(row["mean"], row["std"])
        table.add(name, shape(variant), accuracy, row["flops"] / 1e9, row["seconds"])
    table.add("guessing", "", spread(1 / RECALL.symbols, None), None, None)
    found.tables.append(table)
    return found
