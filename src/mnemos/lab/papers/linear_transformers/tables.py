"""Likelihood and speed of images byte by byte (Tables 1 and 2, latencies), constant memory, and speech (Table 3)."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mnemos import registry
from mnemos.generate.fused import fused_step
from mnemos.generate.stream import Stream
from mnemos.lab.measure.decoding import whole, with_state, without_state
from mnemos.lab.measure.gradients import state_bytes
from mnemos.lab.measure.peak import peak_of
from mnemos.lab.recipes.family import altered
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.tasks.metrics import bits
from mnemos.models.transformer import Transformer, TransformerConfig

from ..claims import Claim
from ..findings import Finding, Table, spread
from ..reproduce import Options, OtherDataError
from ..small_runs import shortened, task, train
from .recipes import LSH_ROUNDS, NAMES, PAPER, attention

# ---- Tables 1 and 2: bits of small models, and pictures a second of the paper's ----

Time = Callable[[int, int], float]  # (rows, position) to seconds
STEPS = 500
BATCHES = (1, 8, 64)  # tried in order, until the next size yields less than 10 % more images per second
_CONVENTION = (
    "bits/dim: mean negative log-likelihood per predicted byte, divided by ln 2. The first byte of a picture is given, "
    "so there are 783 predictions for MNIST and 3,071 for CIFAR-10."
)
_TIMED = "Steps are timed at five positions of an image and interpolated linearly. Fused: mnemos.fused_step."


def likelihood_and_speed(claim: Claim, options: Options) -> Finding:
    """Table 1 (MNIST) or 2 (CIFAR-10): models on the data of --data, or without it on scikit-learn's digits."""
    mnist = claim.name == "table1"
    finding = Finding([], [_CONVENTION])
    # --- bits of small models that differ in their attention only ---
    recipes = {name: small_recipe(options, name) for name in NAMES}
    data, _ = task(options)
    trained = train(finding, options, f"pixels-{data}", recipes)
    first: Any = recipes[NAMES[0]]
    pictures = {"cifar": "16 x 16 x 3", "mnist": "28 x 28", "digits": "8 x 8"}[data]
    count, layers = first.data.build().images("test"), first.model.layers
    table = finding.table(
        f"Bits/dim of {count:,} test images of {data} at {pictures}: {layers} layers, {first.train.steps:,} updates",
        ["", "bits/dim", "minus linear", "seconds of training", "paper bits/dim", "paper minus linear"],
    )
    for name, row in trained.rows.items():
        theirs, linear = claim.values[name][0], claim.values["linear"][0]
        ours = spread(bits(row["mean"]), None if row["std"] is None else bits(row["std"]), 1.0, 3)
        minus = bits(row["mean"] - trained.rows["linear"]["mean"])
        table.add(name, ours, minus, row["seconds"], theirs, theirs - linear)
    finding.notes.append("The small models predict one of 256 classes, the paper's models a mixture of logistics.")
    # --- images per second of the paper's model, which is not trained: the weights do not change the time ---
    config = PAPER if mnist else replace(PAPER, layers=16, max_length=3071)
    table = finding.table(
        f"Images of {config.max_length} bytes per second, {torch.get_num_threads()} threads, each at its best batch of "
        f"{', '.join(map(str, BATCHES))}",
        ["", "images/s", "batch", "linear is faster by", "paper images/s", "paper linear is faster by"],
    )
    best: dict[str, tuple[float, int]] = {}
    for name, timed in _ways(config).items():
        best[name] = 0.0, 0
        for batch in BATCHES:
            speed = batch / whole(partial(timed, batch), config.max_length)
            faster = speed > best[name][0] * 1.1
            best[name] = max(best[name], (speed, batch))
            if not faster:
                break
    for name, (speed, batch) in best.items():
        theirs_here = claim.values[name][1] if name in claim.values else None
        ratio = None if theirs_here is None else claim.values["linear"][1] / theirs_here
        table.add(name, speed, batch, best["linear"][0] / speed, theirs_here, ratio)
    finding.notes.append(f"{_TIMED} The paper's values are from a GTX 1080 Ti.")
    return finding


def small_recipe(options: Options, variant: str) -> Recipe:
    """The small recipe of images byte by byte for the data of the options, with an attention of `NAMES`."""
    name, fields = task(options)
    small: Recipe = registry.load("recipe", "digits-pixels" if name == "digits" else f"{name}-pixels-small")()
    small = altered(small, data={"images": fields}, train={"steps": options.steps or STEPS})
    length = small.data.build().max_length
    return altered(small, name=f"{small.name}-{variant}", model={"attention": attention(variant, length)})


def _ways(config: TransformerConfig) -> dict[str, Time]:
    """For each way to generate: a function that times one step, with the number of rows and the position."""
    hashed = [f"lsh-{rounds}" for rounds in LSH_ROUNDS]
    models = {name: built(name, config) for name in ("softmax", "linear", *hashed)}
    ways: dict[str, Time] = {
        name: partial(without_state, models[name], vocab_size=256) for name in ("softmax", *hashed)
    }
    for name in ("softmax, cached", *(f"{name}, cached" for name in hashed), "linear"):
        ways[name] = partial(with_state, models[name.removesuffix(", cached")], vocab_size=256)
    # LSH has no fused step: its state is all tokens, sorted again for each.
    for name in ("softmax, cached", "linear"):
        model = models[name.removesuffix(", cached")]
        if (step := fused_step(model)).fused:
            ways[f"{name}, fused"] = partial(with_state, model, vocab_size=256, step=step)
    return ways


def built(name: str, config: TransformerConfig) -> Transformer:
    """The model with an attention of `NAMES`, not trained."""
    torch.manual_seed(0)
    return Transformer(replace(config, attention=attention(name, config.max_length))).eval()


def latency(claim: Claim, options: Options) -> Finding:
    """Seconds to generate one MNIST image at batch size 1 with the paper's model on this CPU."""
    table = Table(
        f"Seconds to generate one image of {PAPER.max_length} bytes, batch size 1, {torch.get_num_threads()} threads",
        ["", "seconds", "relative to linear", "paper seconds", "paper relative to linear"],
    )
    seconds = {name: whole(partial(time, 1), PAPER.max_length) for name, time in _ways(PAPER).items()}
    for name, value in seconds.items():
        theirs = claim.values.get(name, (None,))[0]
        ratio = None if theirs is None else theirs / claim.values["linear"][0]
        table.add(name, value, value / seconds["linear"], theirs, ratio)
    return Finding([table], [_TIMED])


# ---- §4.2.1: generation at constant memory ----

IMAGES = (100, 1000, 10_000)  # of linear attention, at once
CACHED = (10, 100)  # of softmax with kept keys
BYTES = 4  # generated in each measurement
POSITIONS = (1, 17, 98, 196, 392, 783)  # bytes read, for the size of the state
_AT_ONCE = (
    "The paper's model: 8 layers, 8 heads of 32, not trained, because the weights change neither bytes nor time. All "
    "images continue one beginning, which is read once; every image draws its own bytes. The peak is of the whole "
    "process beyond the model: two states, before and after a step, and what a step computes. The paper: "
    '"simultaneously generate 10,000 MNIST images with a single GPU".'
)


def constant_memory(claim: Claim, options: Options) -> Finding:
    """The bytes of state by position and by number of images, and the peak of a few steps of all images at once."""
    models = {"linear": built("linear", PAPER), "softmax, cached": built("softmax", PAPER)}
    # --- the state of one image by position ---
    sizes = {name: [state_bytes(_read(model, n).state) for n in POSITIONS] for name, model in models.items()}
    states = Table("Bytes of state per image", ["bytes read", "linear", "softmax, cached", "linear's share"])
    for n, linear, softmax in zip(POSITIONS, *sizes.values(), strict=True):
        states.add(str(n), linear, softmax, linear / softmax)
    most, of_one = max(IMAGES), sizes["linear"][-1]
    note = (
        f"The state of {most:,} images of linear attention is {most * of_one / 2**30:.2f} GiB at each of these places. "
        f"As many bytes hold the keys and values of {most * of_one // sizes['softmax, cached'][-1]:,} images after the "
        "last byte."
    )
    # --- many images at once: the largest number at three positions, the others at the end ---
    images = Table(
        f"Generating {BYTES} bytes of many images at once, {torch.get_num_threads()} threads",
        ["", "images", "bytes before", "GiB of state", "peak GiB", "peak MiB per image", "seconds per byte"],
    )
    end = PAPER.max_length + 1
    for name, counts in (("linear", IMAGES), ("softmax, cached", CACHED)):
        for count in counts:
            for position in (1, end // 2, end - BYTES) if count == max(counts) else (end - BYTES,):
                state, peak, seconds = _generate(models[name], count, position)
                peaks = (None, None) if peak is None else (peak / 2**30, peak / 2**20 / count)
                images.add(name, count, position, state / 2**30, *peaks, seconds)
    return Finding([states, images], [_AT_ONCE, note])


def _read(model: Transformer, count: int) -> Stream:
    """A stream of one image after `count` bytes, the last of which the state does not hold yet."""
    tokens = torch.randint(256, (1, count + 1), generator=torch.Generator().manual_seed(0))
    return Stream(model).prefill(tokens)


def _generate(model: Transformer, count: int, position: int) -> tuple[int, int | None, float]:
    """The bytes of state after `BYTES` steps of `count` images from a position, their peak, and seconds per step."""
    first, size, seconds = _read(model, position - 1), 0, 0.0

    def run() -> None:
        nonlocal size, seconds
        stream, generator = first.select(torch.zeros(count, dtype=torch.long)), torch.Generator().manual_seed(0)
        start = time.perf_counter()
        for _ in range(BYTES):  # generate(BYTES) would keep the state of `stream`, a third one
            _, stream = stream.generate(1, generator=generator)
        seconds, size = (time.perf_counter() - start) / BYTES, state_bytes(stream.state)

    peak = peak_of(run)
    return size, peak, seconds


# ---- Table 3: speech with CTC ----

MODELS = ("bilstm", "softmax", "lsh", "linear")  # the endings of the recipes' names; LSH has four rounds, as there


def speech(claim: Claim, options: Options) -> Finding:
    """Table 3: error rate and seconds per epoch of small models, on the recordings in --data."""
    finding = Finding()
    if options.data is None:
        raise OtherDataError(
            "--data: expected a folder of LABEL_SPEAKER_TAKE.wav files, such as the Free Spoken Digit Dataset, found "
            "none; add --data FOLDER"
        )
    recipes = {name: registry.load("recipe", f"spoken-digits-{name}")() for name in MODELS}
    recipes = {name: shortened(one, options, evaluations=4) for name, one in recipes.items()}
    recipes = {name: altered(one, data={"path": str(options.data)}) for name, one in recipes.items()}
    trained = train(finding, options, "speech", recipes)
    steps = recipes["linear"].train.steps
    table = finding.table(
        f"Strings of spoken words, {steps:,} updates. The paper's rates are for phonemes of another data set.",
        ["", "token error rate, %", "seconds per epoch", "paper phoneme error rate, %", "paper seconds per epoch"],
    )
    for name in MODELS:
        epochs = [one.epoch_seconds or 0.0 for one in trained.results(name)]
        theirs = claim.values["lsh-4" if name == "lsh" else name]
        table.add(name, trained.score(name), sum(epochs) / len(epochs), *theirs)
    return finding
