"""What a model of images byte by byte writes: pictures of its own, and the lower halves of pictures whose upper it saw.

`samples.safetensors` of a run: samples [N, H, W, C], originals [K, H, W, C] of the test split and completions
[K, ways, H, W, C] of each, all uint8, the upper `given` rows of which are the original's; `samples.json` says the rest:
{"given", "seed", "temperature", "seconds", "bytes": how many were drawn}.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mnemos.atomic import replacing, write_json
from mnemos.generate.stream import Stream
from mnemos.types import InputError

if TYPE_CHECKING:
    from .pixels import PixelTask

WAYS = 3  # completions of a picture


def write_pictures(
    model: nn.Module,
    task: "PixelTask",
    folder: Path,
    count: int = 24,
    completed: int = 8,
    seed: int = 0,
    **how: Any,
) -> dict[str, Tensor]:
    """Draw `count` pictures and complete `completed` of the test split's; write both files, and return the pictures.

    how: temperature, top_k and top_p of `Stream.generate`.

    The first byte of a picture, where the model does not predict it (the task has no start token), is that of a
    training picture. The same seed gives the same pictures. Cost: H·W·C steps of the model.
    """
    if count < 0 or completed < 0 or not count + completed:
        raise InputError(f"expected at least one picture to draw or complete, found {count} and {completed}")
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    start, tensors, drawn = time.perf_counter(), {}, 0
    whole = int(np.prod(task.shape))
    if count:
        rows = torch.randint(task.images("train"), (count,), generator=generator).tolist()
        first = torch.tensor([[int(task.bytes("train", row)[0])] for row in rows], device=device)
        first = first[:, : not task.start]
        tensors["samples"] = task.pictures(_go_on(model, task, first, whole, generator, how))
        drawn += count * (whole - first.shape[1])
    given = task.shape[0] // 2
    completed = min(completed, task.images("test"))
    if completed and given:
        rows = [i * task.images("test") // completed for i in range(completed)]
        originals = torch.from_numpy(np.stack([task.bytes("test", row) for row in rows]).astype(np.int64))
        seen = originals[:, : given * task.shape[1] * task.shape[2]].repeat_interleave(WAYS, 0).to(device)
        written = task.pictures(_go_on(model, task, seen, whole, generator, how))
        tensors["originals"] = task.pictures(originals)
        tensors["completions"] = written.reshape(completed, WAYS, *task.shape)
        drawn += len(seen) * (whole - seen.shape[1])
    about = {"given": given, "seed": seed, "temperature": how.get("temperature", 1.0), "bytes": drawn}
    about["seconds"] = round(time.perf_counter() - start, 3)
    from safetensors.torch import save_file

    found = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in tensors.items()}
    with replacing(folder / "samples.safetensors") as temporary:
        save_file(found, str(temporary))
    write_json(folder / "samples.json", about)
    return found


def _go_on(
    model: nn.Module, task: "PixelTask", seen: Tensor, length: int, generator: torch.Generator, how: dict[str, Any]
) -> Tensor:
    """The bytes [B, length] that begin with those seen [B, n]."""
    tokens = Stream(model).prefill(task.begun(seen)).generate(length - seen.shape[1], generator=generator, **how)[0]
    return torch.cat([seen, tokens], 1)
