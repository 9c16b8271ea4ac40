"""Tables 1 to 3, pictures byte by byte, language modelling and replay: costs and small models; and recall of a fact."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import ModelConfig
from mnemos.lab.compare.baselines import parameters
from mnemos.lab.measure.flops import count_flops, forward_flops
from mnemos.lab.measure.gradients import WAYS, check_ways, most_saved, state_bytes
from mnemos.lab.measure.peak import peak_of
from mnemos.lab.measure.timing import race, ratio
from mnemos.lab.recipes.family import altered
from mnemos.lab.run.recipe import Recipe
from mnemos.memory.slots import SlotsConfig
from mnemos.models.memformer import MemformerConfig
from mnemos.models.transformer import TransformerConfig
from mnemos.types import Output, State

from ..claims import Claim, Values
from ..experiments import add_differences
from ..findings import Finding, Table, spread
from ..reproduce import Options
from ..small_runs import digits_or_mnist, perplexities, perplexity_text, shortened, train
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

# ---- Table 1: pictures byte by byte ----

_PICTURES_COUNTED = (
    "GFLOP: a multiply-add counts as 2. A picture is read from its first byte, with empty memories. The paper says "
    "neither how it counts nor how long Memformer's segments are; here a segment is a row of 28 bytes. No length gives "
    "the paper's FLOPs of all Memformers."
)
# The rows of Table 1 with which others are compared: ablations, which begin so, with that of 2 + 6 layers.
WHOLE, ABLATED = "Memformer 4+8", "Memformer 2+6 memory=64"
_ABLATIONS = ("Memformer 2+6", "w/o", "temperature")


def table1(claim: Claim, options: Options) -> Finding:
    """Table 1: FLOPs of the paper's models; perplexities of small models on MNIST or scikit-learn's digits."""
    costs = Table("The paper's models: one picture of 784 bytes", ["", "parameters", "GFLOP", "paper GFLOP"])
    for row in PICTURES:
        config, rollout = picture_variant(row, ImageSizes())
        # Memformer divides a picture into segments itself, with the same operations.
        segment = rollout.segment_length if config.name == "transformer" else 0
        # From shapes only; an LSTM must run to be counted.
        with torch.device("cpu" if config.name == "lstm" else "meta"):
            model, picture = config.build().eval(), torch.zeros(1, ImageSizes().length, dtype=torch.int64)
            flops = forward_flops(model, picture, segment=segment)
        costs.add(row, parameters(config), flops / 1e9, claim.values.get(row, (None,))[0])
    finding = Finding([costs], [_PICTURES_COUNTED])
    data, fields = digits_or_mnist(options)
    recipes = {row: altered(picture_recipe(data, row), data={"images": fields}) for row in PICTURES}
    pairs = [(ABLATED if row.startswith(_ABLATIONS) else WHOLE, row) for row in recipes]
    title = f"Perplexity per byte of {data}, small models"
    _add_perplexities(finding, claim, options, f"table1-{data}", recipes, title, "GFLOP", pairs)
    return finding


def _add_perplexities(
    finding: Finding,
    claim: Claim,
    options: Options,
    folder: str,
    recipes: Mapping[str, Recipe],
    title: str,
    flops: str,
    pairs: Sequence[tuple[str, str]],
) -> None:
    """Train the small models of a table's rows; add their table and the differences of pairs."""
    # --- the table ---
    trained = train(finding, options, folder, {row: shortened(one, options) for row, one in recipes.items()})
    scores = perplexities(trained)
    columns = ["", "model here", "parameters", "perplexity", flops, "seconds of training", "paper perplexity"]
    table = finding.table(title, columns)
    for name, recipe in recipes.items():
        row, theirs = trained.rows[name], claim.values.get(name, (None, None))[1]
        cells = row["parameters"], perplexity_text(scores[name]), row["flops"] / 1e9, row["seconds"]
        table.add(name, shape(recipe), *cells, theirs)
    # --- differences ---
    add_differences(finding, options, scores, [(one, other) for one, other in pairs if one != other])


def shape(recipe: Recipe) -> str:
    """A description of the small model, such as "2+4 layers, 4 slots"."""
    model: Any = recipe.model
    if model.name == "memformer":
        return f"{model.encoder_layers}+{model.decoder_layers} layers, {model.memory.slots} slots"
    attention = getattr(model, "attention", None)
    sizes = {name: getattr(attention, name, None) for name in ("memory", "compressed")}
    return ", ".join([f"{model.layers} layers", *(f"{name} {n}" for name, n in sizes.items() if n is not None)])


# ---- Table 2: language modelling ----

PAPER = LanguageSizes()._replace(dropout=0.0)
ROUNDS = 3
SPEED = 3.2  # the paper's ratio of inference speeds
COMPARED = {"Transformer-XL": "Transformer-XL base memory=1024", "Memformer": "Memformer 4+16"}
_TEXT_COUNTED = (
    "GFLOP per segment of 128 tokens, with full memories; a multiply-add counts as 2. The vocabulary is 256 bytes, so "
    "the softmax hardly counts. The paper uses words, and does not say whether it counts the softmax over them."
)
_TIMED = (
    "Batch size 1, not trained (weights do not change the time). Generated: 128 tokens one by one; the encoder runs "
    "once for them. Read: one segment per call. State: bytes per stream at the start of a segment, and the maximum; "
    "within a segment Memformer also keeps the keys and values of its decoder. The paper gives no times for its 3.2, "
    "which is near the ratios of its FLOPs, 3.1 to Transformer-XL with a memory of 1,024 and 3.2 to the Compressive "
    "Transformer. Its 8.1 times less memory is of Figure 5."
)


def table2(claim: Claim, options: Options) -> Finding:
    """Table 2: FLOPs of the paper's models, inference with two of them, and perplexities of small models."""
    costs = Table("The paper's models: one segment of text", ["", "parameters", "GFLOP", "paper GFLOP"])
    gflop = {}
    for row in LANGUAGE:
        config, _ = language_variant(row, PAPER)
        with torch.device("meta"):
            gflop[row] = _gflop(config.build().eval())
        costs.add(row, parameters(config), gflop[row], claim.values[row][0])
    finding = Finding([costs, _inference(gflop, claim.values)], [_TEXT_COUNTED, _TIMED])
    path, small = None if options.data is None else str(options.data), SMALL_LANGUAGE
    title = f"Perplexity per byte of {path or 'the standard library'}, models of width {small.dim}"
    recipes = {row: language_recipe(row, path) for row in LANGUAGE}
    pairs = [(COMPARED["Memformer"], row) for row in recipes]
    title, flops = f"{title}, segments of {small.segment}", "GFLOP, first segment"
    _add_perplexities(finding, claim, options, "table2-text", recipes, title, flops, pairs)
    finding.notes.append("The paper's perplexities are per word, on WikiText-103, medians of three runs.")
    return finding


def _gflop(model: nn.Module) -> float:
    """GFLOP of one segment in the middle of a stream, computed from shapes without running the model."""
    segment = torch.zeros(1, PAPER.segment, dtype=torch.int64, device="meta")
    with torch.no_grad():
        attention = getattr(model.config, "attention", None)
        if memory := getattr(attention, "memory", 0):
            memory += getattr(attention, "compressed", 0) * getattr(attention, "ratio", 0)  # tokens until it is full
            _, state = model(segment.repeat(1, -(-memory // PAPER.segment)))
            return count_flops(partial(model, segment, state)) / 1e9
        # The cost of the second of two segments: the first one also encodes the start token.
        two = torch.cat([segment, segment], 1)
        return (count_flops(partial(model, two)) - count_flops(partial(model, segment))) / 1e9


def _inference(gflop: Mapping[str, float], values: Values) -> Table:
    """Time and bytes of two models of equal width, with a memory of 1,024 tokens or slots."""
    length, memory = PAPER.segment, 1024 // PAPER.length_divisor
    table = Table(
        f"Inference at width {PAPER.dim}, memory {memory:,}, {torch.get_num_threads()} threads",
        ["", "ms per generated token", "ms per read token", "GFLOP per segment", "state MiB", "maximum state MiB"],
    )
    # --- two models in the middle of a stream, with full memories ---
    tokens = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0))
    runs: dict[str, Callable[[], object]] = {}
    sizes = {}
    for name, row in COMPARED.items():
        torch.manual_seed(0)
        model = language_variant(row, PAPER)[0].build().eval()
        state: State = None
        read = torch.inference_mode()(partial(model, tokens))
        for _ in range(memory // length):
            _, state = read(state)
        runs[f"{name}, generated"] = partial(_generate, model, tokens, state)
        runs[f"{name}, read"] = partial(read, state)
        sizes[name] = [gflop[row], state_bytes(state) / 2**20, _generate(model, tokens, state) / 2**20]
    # --- times, and the ratios beside the paper's ---
    times = {name: 1e3 * statistics.median(each) / length for name, each in race(runs, ROUNDS).items()}
    xl, ours = ([times[f"{name}, generated"], times[f"{name}, read"], *sizes[name]] for name in COMPARED)
    theirs = [values[row][0] for row in COMPARED.values()]
    for name, cells in zip(COMPARED, (xl, ours), strict=True):
        table.add(name, *cells)
    table.add("Transformer-XL / Memformer", *(a / b for a, b in zip(xl, ours, strict=True)))
    table.add("paper's ratio", SPEED, SPEED, theirs[0] / theirs[1], None, None)
    return table


@torch.inference_mode()
def _generate(model: nn.Module, tokens: Tensor, state: State) -> int:
    """Read the tokens one by one; the most bytes of the state."""
    sizes = []
    for token in tokens.T:
        _, state = model(token[None], state)
        sizes.append(state_bytes(state))
    return max(sizes)


# ---- Table 3: memory and speed of replay, back-propagation through time and gradient checkpointing ----

# The paper's number of layers and horizon, at a smaller width.
MODEL = MemformerConfig(
    vocab_size=256,
    dim=64,
    encoder_layers=4,
    decoder_layers=16,
    num_heads=8,
    mlp=256,
    segment=64,
    memory=SlotsConfig(slots=64, temperature=0.125),
)
ROWS, HORIZON, REPLAY_ROUNDS = 4, 8, 5
# The paper's names, and the names in `mnemos.lab.measure.gradients`.
ROUTES = {
    "BPTT": "through time",
    "GC": "torch.utils.checkpoint",
    "MRBP": "replay, advance",
    "MRBP without advance": "replay",
}
_REPLAY = (
    "All ways compute the same gradients; this is checked first. BPTT: back-propagation through time. GC: "
    "torch.utils.checkpoint around each segment. MRBP: mnemos.replay, whose first pass runs only the encoder and the "
    "writer. Saved: the maximum bytes of tensors that autograd keeps, without parameters (unknown for checkpointing). "
    "States: the bytes stored between the two passes. Process peak: memory in addition to that before the call, "
    "including gradients. The paper has the memory of a GPU, and does not say what it includes."
)


class SegmentLoss(nn.Module):
    """A language model as one segment of a rollout: `loss, state = model(tokens, state)`, tokens [B, L + 1]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, state: State = None) -> Output:
        """The mean negative log-likelihood of tokens[:, 1:], and the new state."""
        logits, state = self.model(tokens[:, :-1], state)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), state

    def advance(self, tokens: Tensor, state: State = None) -> State:
        """The new state only: runs Memformer's encoder and writer."""
        return self.model.advance(tokens[:, :-1], state)


def table3(claim: Claim, options: Options) -> Finding:
    """Table 3: memory and speed of three ways to compute the same gradients."""
    # --- what is measured ---
    torch.manual_seed(0)
    model = SegmentLoss(MODEL.build())
    segments = list(torch.randint(MODEL.vocab_size, (HORIZON, ROWS, MODEL.segment + 1)))
    check_ways(model, segments[:3])
    runs = {name: partial(WAYS[way], model, segments) for name, way in ROUTES.items()}
    with torch.no_grad():
        stored = HORIZON * state_bytes(model.advance(segments[0]))
    # --- the table ---
    layers = f"{MODEL.encoder_layers} + {MODEL.decoder_layers} layers of width {MODEL.dim}"
    sizes = f"{MODEL.memory.slots} slots, {HORIZON} segments of {MODEL.segment}, batch {ROWS}"
    columns = ["", "MiB saved", "MiB of states", "process peak MiB", "relative to BPTT", "relative speed"]
    table = Table(
        f"One rollout of Memformer: {layers}, {sizes}, {torch.get_num_threads()} threads",
        [*columns, "paper MB", "paper relative to BPTT", "paper relative speed"],
    )
    saved = {name: most_saved(run) for name, run in runs.items()}
    peaks = {name: peak_of(run) for name, run in runs.items()}
    times = race(runs, REPLAY_ROUNDS)
    for name, (mb, speed) in {**dict.fromkeys(runs, (None, None)), **claim.values}.items():
        autograd = None if name == "GC" else saved[name] / 2**20
        states = stored / 2**20 if ROUTES[name].startswith("replay") else 0.0
        peak, most = peaks[name], peaks["BPTT"]
        space = (None, None) if peak is None or most is None else (peak / 2**20, peak / most)
        share = None if mb is None else mb / claim.values["BPTT"][0]
        table.add(name, autograd, states, *space, ratio(times, "BPTT", name).median, mb, share, speed)
    limit = 3 * HORIZON / (4 * HORIZON - 1)
    note = (
        "Upper limits of the speed, if a backward pass costs as much as two forward passes: checkpointing 0.75, replay "
        f"without advance {limit:.3f}. With advance the limit is higher, because the first pass omits the decoder."
    )
    return Finding([table], [_REPLAY, note])


# ---- recall of a fact, not in the paper ----


def recall(claim: Claim, options: Options) -> Finding:
    """The accuracy at the full distance."""
    finding = Finding()
    recipes = {name: shortened(one, options) for name, one in variants().items()}
    trained = train(finding, options, "recall", recipes)
    table = finding.table(
        f"Accuracy {RECALL.distance:,} tokens ({RECALL.distance // RECALL_MODEL.segment} segments) after the fact",
        ["", "model here", "right, %", "GFLOP per sequence", "seconds of training"],
    )
    for name, recipe in recipes.items():
        row = trained.rows[name]
        table.add(name, shape(recipe), trained.score(name), row["flops"] / 1e9, row["seconds"])
    table.add("guessing", "", spread(1 / RECALL.symbols, None), None, None)
    return finding


def variants() -> Mapping[str, Recipe]:
    """Memformer with replay, the same with the paper's settings, with a horizon of 1, and softmax over two segments.

    With preset="paper" the decoder does not read the slots: the value must pass from them through the encoding of a
    segment before the question's.
    """
    base = recall_memformer()
    model: Any = base.model
    segment = base.train.rollout.segment_length
    windowed: ModelConfig = TransformerConfig.classic(
        vocab_size=0,
        dim=model.dim,
        layers=model.encoder_layers + model.decoder_layers,
        num_heads=model.num_heads,
        mlp=model.mlp,
        max_length=0,
        dropout=model.dropout,
        attention=SoftmaxConfig(window=2 * segment),
    )
    paper = {"preset": "paper", "decoder_reads": False}
    return {
        "Memformer, replay": base,
        "Memformer as in the paper, replay": altered(base, name=f"{base.name}-paper", model=paper),
        "Memformer, horizon 1": altered(base, name=f"{base.name}-horizon-1", train={"rollout": {"horizon": 1}}),
        f"softmax, window {2 * segment}": replace(base, name="recall-softmax", model=windowed),
    }
