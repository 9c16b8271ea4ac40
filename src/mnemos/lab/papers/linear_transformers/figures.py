"""Figures 1 to 3: time and memory by length, the copy task by update, and pictures that a model generates."""

import math
import statistics
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mnemos.lab.measure.peak import peak_of
from mnemos.lab.measure.timing import race
from mnemos.lab.recipes.family import altered
from mnemos.lab.report.outputs import write_grids
from mnemos.lab.report.read import read_run
from mnemos.lab.run.files import Measurement
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.trained import open_run
from mnemos.lab.tasks.pixels import WAYS, PixelTask, write_pictures
from mnemos.ops.linear import linear_attention
from mnemos.types import InputError

from ..baselines.reformer import draw_rotations, reformer_attention
from ..claims import Claim
from ..drawing import draw_seeds, panels, variant
from ..findings import Finding, Table
from ..reproduce import Options
from ..small_runs import shortened, task, train
from .recipes import attention, copy_small
from .tables import small_recipe

# ---- Figure 1: time and memory of a forward and backward pass of each attention, by sequence length ----

HEADS, WIDTH = 8, 32
CHUNK, BUCKETS = 32, 64  # of the Reformer, at every length
TOKENS = 2**13  # per batch: longer sequences mean fewer rows
LENGTHS = tuple(2**i for i in range(9, 17))
ROUNDS = 3
# Each attention's greatest length, beyond which a call takes more than four seconds, or weights of four GiB.
LONGEST = {"softmax, written out": 2**11, "softmax": 2**13, "lsh-1": 2**16, "lsh-4": 2**14, "lsh-8": 2**14}
LONGEST["linear"] = 2**16
ATTENTIONS = tuple(LONGEST)
Measured = dict[str, dict[int, tuple[float, float | None]]]  # by attention and length: seconds and bytes per sample
_MEASURED = (
    f"Causal attention without projections, {HEADS} heads of width {WIDTH}, float32, batches of {TOKENS:,} tokens or "
    'one sample. "softmax, written out" stores its N x N weights, as in the paper; "softmax" is PyTorch\'s fused '
    f"kernel. LSH is the Reformer's attention, in chunks of {CHUNK} and with {BUCKETS} buckets. Medians of {ROUNDS} "
    "rounds."
)


def figure1(claim: Claim, options: Options) -> Finding:
    """Figure 1: time and peak memory per sample for N = 2⁹ … 2¹⁶, all on this CPU."""
    # --- the tables, and how time grows ---
    measured = measure(LENGTHS)
    times = Table("Milliseconds per sample, forward and backward", ["N", *ATTENTIONS])
    memory = Table("Peak MiB per sample", ["N", *ATTENTIONS])
    for n in measured["linear"]:
        cells = [measured[name].get(n, (None, None)) for name in ATTENTIONS]
        times.add(str(n), *(None if seconds is None else 1e3 * seconds for seconds, _ in cells))
        memory.add(str(n), *(None if size is None else size / 2**20 for _, size in cells))
    growth = []
    for name, by_length in measured.items():
        if len(by_length) > 1:
            (_, before), (n, last) = list(by_length.items())[-2:]
            growth.append(f"{name} ×{last[0] / before[0]:.1f} (to N = {n:,})")
    # --- the picture: what was not measured has no point ---
    path = options.out / "figure1.png"
    titles = ("Time per sample, ms", "N, tokens"), ("Memory per sample, MiB", "N, tokens")
    with panels(path, *titles, log="xy") as (left, right):
        for i, name in enumerate(ATTENTIONS):
            left.plot(list(measured[name]), [1e3 * s for s, _ in measured[name].values()], **variant(i), label=name)
            sizes = {n: size / 2**20 for n, (_, size) in measured[name].items() if size}
            right.plot(list(sizes), list(sizes.values()), **variant(i))
    notes = [
        _MEASURED,
        "A dash: not measured, because a call takes more than about four seconds, or weights of four GiB.",
        f"Growth of the time per sample over the last doubling of the length: {', '.join(growth)}.",
    ]
    return Finding([times, memory], notes, [path])


def measure(lengths: tuple[int, ...]) -> Measured:
    """Measure every attention at every length up to its greatest."""
    measured: Measured = {name: {} for name in ATTENTIONS}
    for n in lengths:
        rows = max(1, TOKENS // n)
        torch.manual_seed(0)
        q, k, v = (torch.randn(rows, n, HEADS, WIDTH, requires_grad=True) for _ in range(3))
        upstream = torch.randn(rows, n, HEADS, WIDTH)
        calls = {name: partial(_forward_backward, name, q, k, v, upstream) for name in ATTENTIONS if n <= LONGEST[name]}
        peaks = {name: peak_of(call) for name, call in calls.items()}
        times = race(calls, ROUNDS)
        for name, peak in peaks.items():
            measured[name][n] = statistics.median(times[name]) / rows, None if peak is None else peak / rows
    return measured


def _forward_backward(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, upstream: torch.Tensor) -> None:
    if name.startswith("softmax"):
        heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        with sdpa_kernel([SDPBackend.MATH] if name != "softmax" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    elif name == "linear":
        y, _ = linear_attention(q, k, v)
    else:
        rounds = int(name.removeprefix("lsh-"))
        rotations = draw_rotations(rounds, HEADS, WIDTH, BUCKETS, torch.Generator().manual_seed(0))
        y = reformer_attention(q, v, rotations, CHUNK, causal=True)
    torch.autograd.grad(y, (q, v) if name.startswith("lsh") else (q, k, v), upstream)


# ---- Figure 2: what small models learn of the copy task ----

COPIERS = ("softmax", "lsh-4", "linear")
LEARNED = 0.02  # nats per symbol; the initial loss is log 10 = 2.3


def figure2(claim: Claim, options: Options) -> Finding:
    """Figure 2 with small models: the loss by update, and the share of correct symbols at the end."""
    finding, recipes = Finding(), {name: copy_recipe(options, name) for name in COPIERS}
    trained = train(finding, options, "copy", recipes)
    steps = recipes["linear"].train.steps
    table = finding.table(
        f"Copying words of 16 to 31 of 10 symbols: models of 2 layers, {steps:,} updates",
        ["", "symbols right, %", "test loss, nats", f"updates until {LEARNED:g} nats", "seconds of training"],
    )
    # --- the table: of each row its worst seed ---
    for name, row in trained.rows.items():
        loss = max(one.score("loss") for one in trained.results(name))
        firsts = []  # of each seed: the update by which the validation loss has reached `LEARNED`
        for run in trained.runs[name]:
            lines = [line for line in Measurement.read_all(run) if line.kind == "valid"]
            firsts.append(next((line.step for line in lines if line.values["loss"] <= LEARNED), math.inf))
        learned = None if math.inf in firsts else max(firsts)
        table.add(name, trained.score(name), loss, learned, row["seconds"])
    # --- the picture, and notes ---
    path = options.out / "figure2.png"
    with panels(path, ("Copying", "updates"), log="y", size=(6.4, 4.2)) as (axes,):
        axes.set_ylabel("validation loss, nats")
        for i, (name, runs) in enumerate(trained.runs.items()):
            draw_seeds(axes, [read_run(run, name).valid for run in runs], "step", "loss", i, name)
    finding.files.insert(0, path)
    lsh: Any = recipes["lsh-4"]
    chunk = lsh.model.attention.chunk
    finding.notes += [
        f"LSH has chunks of {chunk}: in each of its {lsh.model.attention.rounds} rounds a token reads at most "
        f"{2 * chunk} of {lsh.data.length} tokens. The paper names no chunk for this task.",
        "Loss and updates are those of the worst seed. A dash: the loss was not reached.",
    ]
    return finding


def copy_recipe(options: Options, name: str) -> Recipe:
    """The small recipe of the copy task with an attention of the paper's tables."""
    base: Any = shortened(copy_small(), options, evaluations=4)
    return altered(base, name=f"copy-{name}", model={"attention": attention(name, base.data.length)})


# ---- Figure 3: samples and completions ----

COUNT, COMPLETED = 24, 8


def figure3(claim: Claim, options: Options) -> Finding:
    """Figure 3 from the run in --run, or from a small model that is trained on MNIST (--data) or scikit-learn's digits.

    Writes two images, of samples and of completions. Nothing is selected; there is no number to compare.
    """
    finding, run = Finding(), options.run
    if run is None:
        recipe = {"linear": small_recipe(options, "linear")}
        (run,) = train(Finding(), options, f"pictures-{task(options)[0]}", recipe, seeds=1).runs["linear"]
    about, data, model = open_run(run)
    if not isinstance(data, PixelTask):
        raise InputError(
            f"{run}: expected a run on images byte by byte, found one on {about.data.name}; choose another"
        )
    folder = options.out / "figure3"
    folder.mkdir(parents=True, exist_ok=True)
    written = write_pictures(model, data, folder, COUNT, COMPLETED)
    table = finding.table(
        f"Images of {' x '.join(map(str, data.shape))} bytes that {about.name} generated", ["", "images"]
    )
    table.add("samples", len(written["samples"]))
    table.add(f"half test images, completed in {WAYS} ways", len(written["originals"]))
    finding.files += write_grids(folder)
    finding.runs.append(run)
    finding.notes.append("Not selected, temperature 1, seed 0. The paper's model is trained for 250 epochs.")
    return finding
