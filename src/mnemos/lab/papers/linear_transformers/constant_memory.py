"""Memory of generation: the state of the paper's MNIST model by position, and of many images generated at once."""

import time

import torch

from mnemos.generate.stream import Stream
from mnemos.lab.measure.peak import peak_of
from mnemos.models.transformer import Transformer
from mnemos.types import State, leaves

from ..claim import Claim
from ..findings import Finding, Table
from ..reproduce import Options
from .generation import built
from .recipes import PAPER

IMAGES = (100, 1000, 10_000)  # of linear attention, at once
CACHED = (10, 100)  # of softmax with kept keys
BYTES = 4  # generated in each measurement
PLACES = (1, 17, 98, 196, 392, 783)  # bytes read, for the size of the state


def constant_memory(claim: Claim, options: Options) -> Finding:
    """The bytes of state by position and by number of images, and the peak of a few steps of all images at once."""
    found = Finding([], [_ABOUT])
    if options.recipes_only:
        return found
    models = {"linear": built("linear", PAPER), "softmax, cached": built("softmax", PAPER)}
    sizes = {name: [_bytes(_read(model, n).state) for n in PLACES] for name, model in models.items()}
    table = Table("Bytes of state per image", ["bytes read", "linear", "softmax, cached", "linear's share"])
    for n, linear, softmax in zip(PLACES, sizes["linear"], sizes["softmax, cached"], strict=True):
        table.add(str(n), linear, softmax, linear / softmax)
    found.tables.append(table)
    most, end = max(IMAGES), PAPER.max_length + 1
    fit = most * sizes["linear"][-1] // sizes["softmax, cached"][-1]
    found.notes.append(
        f"The state of {most:,} images of linear attention is {most * sizes['linear'][-1] / 2**30:.2f} GiB at each of "
        f"these places. As many bytes hold the keys and values of {fit:,} images after the last byte."
    )
    table = Table(
        f"Generating {BYTES} bytes of many images at once, {torch.get_num_threads()} threads",
        ["", "images", "bytes before", "GiB of state", "peak GiB", "peak MiB per image", "seconds per byte"],
    )
    found.tables.append(table)
    for name, counts in (("linear", IMAGES), ("softmax, cached", CACHED)):
        for count in counts:
            for place in (1, end // 2, end - BYTES) if count == max(counts) else (end - BYTES,):
                state, peak, seconds = _generate(models[name], count, place)
                peaks = (None, None) if peak is None else (peak / 2**30, peak / 2**20 / count)
                table.add(name, count, place, state / 2**30, *peaks, seconds)
    return found


_ABOUT = (
    "The paper's model: 8 layers, 8 heads of 32, not trained, because the weights change neither bytes nor time. All "
    "images continue one beginning, which is read once; every image draws its own bytes. The peak is of the whole "
    "process beyond the model: two states, before and after a step, and what a step computes. The paper: "
    '"simultaneously generate 10,000 MNIST images with a single GPU".'
)


def _read(model: Transformer, count: int) -> Stream:
    """A stream of one image after `count` bytes, the last of which the state does not hold yet."""
    tokens = torch.randint(256, (1, count + 1), generator=torch.Generator().manual_seed(0))
    return Stream(model).prefill(tokens)


def _bytes(state: State) -> int:
    return sum(x.nbytes for x in leaves(state))


def _generate(model: Transformer, count: int, place: int) -> tuple[int, int | None, float]:
    """The bytes of state after `BYTES` steps of `count` images from byte `place`, their peak, and seconds per step."""
    first, found = _read(model, place - 1), [0.0, 0.0]

    def run() -> None:
        stream, generator = first.select(torch.zeros(count, dtype=torch.long)), torch.Generator().manual_seed(0)
        start = time.perf_counter()
        for _ in range(BYTES):  # generate(BYTES) would keep the state of `stream`, a third one
            _, stream = stream.generate(1, generator=generator)
        found[:] = (time.perf_counter() - start) / BYTES, _bytes(stream.state)

    peak = peak_of(run)
    return int(found[1]), peak, found[0]
