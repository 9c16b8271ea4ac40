"""Images as sequences of bytes, in the order of rows, pixels and colours, for models that generate them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from mnemos.atomic import replacing, write_json
from mnemos.errors import say
from mnemos.generate.stream import Stream
from mnemos.registry import register
from mnemos.types import InputError, JSONObject

from .batch import Batch
from .image_task import ImageTask
from .images import MNISTConfig
from .metrics import NEXT_TOKEN
from .row_order import Order
from .task import DataConfig, HeldOut, Sampling, Split
from .token_task import TokenTask, sampling_options

START = 0  # the token before a picture's first byte
WAYS = 3  # completions per image


@register
@dataclass(frozen=True)
class PixelsConfig(DataConfig):
    """The images of another data set as sequences of bytes x; the model predicts x[1:] from x[:-1].

    `images` is that data set: mnist or digits with layout image, cifar, or photos (`--data.images.folder`, `.size`).
    Its labels and its augmentation are not used. A picture [H, W, C] is read row by row, and the C colours of a pixel
    one after the other. The first byte is given; with `start` it is predicted too, from a start token, which is byte 0
    and known by its position, so the vocabulary keeps its 256 tokens, which likelihoods over 256 levels require.
    """

    name: ClassVar[str] = "pixels"

    images: DataConfig = field(default_factory=lambda: MNISTConfig(layout="image"))
    start: bool = False

    def files(self) -> Sequence[str | Path] | None:
        return self.images.files()

    def build(self) -> "PixelTask":
        return self._task(self.images.build())

    def build_to_score(self, split: HeldOut, trained: Any = None) -> "PixelTask":
        return self._task(self.images.build_to_score(split, trained))

    def _task(self, task: object) -> "PixelTask":
        if not isinstance(task, ImageTask):
            fix = "set data.images.layout image" if hasattr(self.images, "layout") else "use mnist, cifar or photos"
            raise InputError(
                f"data.images: expected a data set of images, found {self.images.name!r}, which has none; {fix}"
            )
        pixels = PixelTask(task, self.start)
        pixels.about, pixels.whole = task.about, task.whole
        return pixels


class PixelTask(TokenTask):
    """A `Task` of the next byte, a picture per row: inputs and targets [B, H·W·C − 1], or H·W·C with a start token."""

    vocab_size = 256
    metrics = NEXT_TOKEN
    splits_rows = True

    def __init__(self, images: ImageTask, start: bool = False) -> None:
        self._images = images
        self.start = start
        self.shape = images.picture("train", 0).shape  # H, W, C
        self.max_length = int(np.prod(self.shape)) - (not start)
        self._order = Order(images.size("train"))

    def images(self, split: Split) -> int:
        return self._images.size(split)

    def pictures(self, tokens: Tensor) -> NDArray[np.uint8]:
        """Pictures [B, H, W, C] uint8 from sequences of bytes [B, n]."""
        return tokens.cpu().numpy().astype(np.uint8).reshape(-1, *self.shape)

    def bytes(self, split: Split, rows: Sequence[int]) -> Tensor:
        """Pictures of a split as bytes, int64 [B, n]. `pictures` is the inverse."""
        return torch.from_numpy(np.stack([self._images.picture(split, i).reshape(-1) for i in rows]).astype(np.int64))

    def started(self, tokens: Tensor) -> Tensor:
        """The model's inputs that continue the first bytes [B, m] of pictures; [B, 1 + m] with a start token."""
        return F.pad(tokens, (1, 0), value=START) if self.start else tokens

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        return self._batch("train", self._order.batch(index, batch_size, seed))

    def batches(self, split: HeldOut, batch_size: int) -> Iterator[Batch]:
        rows = np.arange(self.images(split))
        return (self._batch(split, rows[i : i + batch_size]) for i in range(0, len(rows), batch_size))

    def _batch(self, split: Split, rows: NDArray[np.int64]) -> Batch:
        pixels = self.started(self.bytes(split, rows.tolist()))
        return Batch(pixels[:, :-1], pixels[:, 1:])

    def size(self, split: Split) -> int:
        return self.images(split) * self.max_length

    def artifacts(self, model: nn.Module, folder: Path, split: HeldOut) -> JSONObject:
        write_pictures(model, self, folder)
        return {}

    def sample_outputs(self, model: nn.Module, sampling: Sampling, folder: Path) -> bool:
        start = time.perf_counter()
        count = 24 if sampling.count is None else sampling.count
        folder.mkdir(exist_ok=True)
        images = write_pictures(model, self, folder, count, min(count, 8), sampling.seed, **sampling_options(sampling))
        completed = len(images["completions"].flatten(0, 1)) if "completions" in images else 0
        size, seconds = " x ".join(map(str, self.shape)), time.perf_counter() - start
        say(f"{count} images of {size} bytes and {completed} completions of half images in {seconds:.1f} s")
        return True


def write_pictures(
    model: nn.Module,
    task: "PixelTask",
    folder: Path,
    count: int = 24,
    completed: int = 8,
    seed: int = 0,
    **options: Any,
) -> dict[str, Tensor]:
    """Generate `count` images and complete `completed` test images; write both files and return the images (uint8).

    samples.safetensors has samples [N, H, W, C], originals [K, H, W, C] of the test split and their completions [K,
    WAYS, H, W, C]; samples.json {"given" (rows of pixels), "seed", "temperature", "seconds", "bytes" (generated)}.
    options: of `Stream.generate`. Without a start token an image's first byte is that of a random training image. Cost:
    H·W·C model steps for all samples together, and half as many for all completions together.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    start, tensors, drawn = time.perf_counter(), {}, 0

    def finish(seen: Tensor) -> NDArray[np.uint8]:
        nonlocal drawn
        left = int(np.prod(task.shape)) - seen.shape[1]
        drawn += len(seen) * left
        stream = Stream(model).prefill(task.started(seen.to(device)))
        return task.pictures(torch.cat([seen, stream.generate(left, generator=generator, **options)[0].cpu()], 1))

    # --- samples ---
    if count:
        rows = torch.randint(task.images("train"), (count,), generator=generator).tolist()
        tensors["samples"] = finish(task.bytes("train", rows)[:, : not task.start])
    # --- completions of the upper half of test images ---
    half = task.shape[0] // 2  # rows of pixels that a completion goes on from
    completed = min(completed, task.images("test"))
    if completed and half:
        originals = task.bytes("test", [i * task.images("test") // completed for i in range(completed)])
        seen = originals[:, : half * task.shape[1] * task.shape[2]].repeat_interleave(WAYS, 0)
        tensors["originals"] = task.pictures(originals)
        tensors["completions"] = finish(seen).reshape(completed, WAYS, *task.shape)
    # --- files ---
    about = {"given": half, "seed": seed, "temperature": options.get("temperature", 1.0), "bytes": drawn}
    about["seconds"] = round(time.perf_counter() - start, 3)
    from safetensors.torch import save_file

    images = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in tensors.items()}
    with replacing(folder / "samples.safetensors") as temporary:
        save_file(images, str(temporary))
    write_json(folder / "samples.json", about)
    return images
