"""Table 2: language modelling with Memformer, Transformer-XL and the Compressive Transformer; cost of inference."""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mnemos.lab.measure.flops import count_flops
from mnemos.lab.measure.gradients import state_bytes
from mnemos.lab.measure.timing import race
from mnemos.types import State

from ..claim import Claim
from ..findings import Finding, Table
from ..perplexities import shape, train
from ..reproduce import Options
from .recipes import language_recipe
from .table_models import LANGUAGE, SMALL_LANGUAGE, LanguageSizes, language_variant

PAPER = LanguageSizes()._replace(dropout=0.0)
ROUNDS = 3
SPEED, SPACE = 3.2, 8.1  # the paper's ratios: speed of inference, memory
_XL_ROWS = "Transformer-XL base memory="
COMPARED = {"Transformer-XL": "Transformer-XL base memory=1024", "Memformer": "Memformer 4+16"}


def table2(claim: Claim, options: Options) -> Finding:
    """Table 2: FLOPs of the paper's models, inference with two of them, and perplexities of small models."""
    found = Finding([], [_COMMANDS])
    if not options.recipes_only:
        costs = _costs(claim)
        found.tables += [costs, _inference()]
        found.notes = [_COUNTED, *_per_token_of_memory(costs), *found.notes, _TIMED]
        _perplexities(found, claim, options)
    return found


_COUNTED = (
    "GFLOP per segment of 128 tokens, with full memories; a multiply-add counts as 2. The vocabulary is 256 bytes. The "
    "paper uses words and seems to count the softmax over them too."
)
_COMMANDS = (
    "At the paper's size, in words: mnemos train wikitext-memformer (wikitext-xl, wikitext-compressive) --data.path "
    "WIKITEXT-103."
)
_TIMED = (
    "Batch size 1, not trained (weights do not change the time). Generated: 128 tokens one by one; the encoder runs "
    "once for them. Read: one segment per call. State: bytes per stream at the start of a segment, and the maximum; "
    "within a segment Memformer also keeps the keys and values of its decoder."
)


def _costs(claim: Claim) -> Table:
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


def _inference() -> Table:
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
    table.add("paper's ratio", SPEED, SPEED, SPEED, SPACE, SPACE)
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


def _perplexities(found: Finding, claim: Claim, options: Options) -> None:
    path = None if options.data is None else str(options.data)
    recipes = {name: language_recipe(name, path) for name in LANGUAGE}
    trained = train(found, options, "table2-text", recipes)
    table = Table(
        f"Perplexity per byte of {path or 'the standard library'}, models of width {SMALL_LANGUAGE.dim}, segments of "
        f"{SMALL_LANGUAGE.segment}",
        ["", "model here", "perplexity", "GFLOP, first segment", "seconds of training", "paper perplexity"],
    )
    for name, recipe in recipes.items():
        row = trained.rows[name]
        cells = (shape(recipe), trained.perplexity(name), row["flops"] / 1e9, row["seconds"])
        table.add(name, *cells, claim.values[name][1])
    found.tables.append(table)
    found.notes += [trained.order(claim.values, 1), "The paper's perplexities are per word, on WikiText-103."]
