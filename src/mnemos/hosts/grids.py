"""The grid of an image's tokens in each call: hosts take images of other sizes than the one they were made for."""

import inspect
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mnemos._compat import outside_transforms
from mnemos.memory.gated_cache import Reads, recomputing

from .host import argument, reach
from .inputs import Grid, NamedModule

NOTES = "_mnemos_grids"  # attribute of a module whose calls show the grid: its `Grids`
_PATCHES = (  # the convolutions that make tokens of patches: of timm, Hugging Face and torchvision
    "patch_embed.proj",
    "embeddings.patch_embeddings.projection",
    "embeddings.patch_embeddings",
    "embeddings.patch_embedding",
    "conv_proj",
)


class GridReader(NamedTuple):
    """Where a call has the grid (height, width): in one or two arguments, or in the shape of a tensor.

    names and positions of the arguments; none: the output is a picture [B, C, height, width], or the first argument is
    tokens [B, height, width, D].
    """

    names: tuple[str, ...] = ()
    positions: tuple[int, ...] = ()

    def __call__(self, args: tuple, kwargs: dict, output: object = None) -> Grid | None:
        if self.names:
            sides = [argument(args, kwargs, *one) for one in zip(self.positions, self.names, strict=True)]
            pair = sides if len(sides) == 2 else sides[0]
            return None if pair is None or pair[0] is None else (pair[0], pair[1])
        if isinstance(output, Tensor):
            return output.shape[2], output.shape[3]
        x = args[0] if args else next(iter(kwargs.values()), None)
        return (x.shape[1], x.shape[2]) if isinstance(x, Tensor) and x.dim() == 4 else None


class Grids:
    """The grid of the present call, between the module that shows it and the attentions below.

    Each thread has its own, because threads may share a model. A repeated forward (activation checkpointing) takes the
    grid that its first one had (see `Reads`). Copies and pickles start empty.
    """

    def __init__(self, reader: GridReader) -> None:
        self.reader = reader
        self._threads = threading.local()
        self._reads = Reads()  # of grids as tensors, empty for one that is not known
        # Written in place with each change of the grid, which is how `Reads` tells them apart.
        self._changes = torch.empty(0, device="cpu")

    def __reduce__(self) -> tuple:
        return type(self), (self.reader,)

    def note(self, args: tuple, kwargs: dict, output: object) -> None:
        """A call begins, or a convolution has ended, that shows the grid of the tokens."""
        self._threads.grid = self.reader(args, kwargs, output)

    def current(self, training: bool) -> Grid | None:
        """The grid of an attention's call; None: not known. training: whether the call may be repeated.

        Raises InputError for a repeated call of which it is not known what the first one had.
        """
        if recomputing():
            sides = self._reads.again(self._changes).tolist()
            return (int(sides[0]), int(sides[1])) if sides else None
        grid: Grid | None = getattr(self._threads, "grid", None)
        if training and not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            with outside_transforms():
                if not hasattr(self._threads, "kept") or self._threads.kept[0] != grid:
                    self._threads.kept = grid, torch.tensor(grid or (), device="cpu")
                    self._changes.zero_()
                self._reads.add(self._changes, self._threads.kept[1])
        return grid


def _find_reader(module: nn.Module, *arguments: tuple[str, ...]) -> GridReader | None:
    """How the calls of a module show the grid, in the first of these arguments that its forward has."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    wanted = next((some for some in arguments if all(name in names for name in some)), None)
    return None if wanted is None else GridReader(wanted, tuple(map(names.index, wanted)))


def find_own_reader(module: nn.Module) -> GridReader | None:
    """How the calls of an attention show the grid by themselves (PVT, Twins); None: they do not."""
    return _find_reader(module, ("height", "width"), ("feat_size",), ("size",))


def find_reader_above(site: NamedModule, in_windows: bool) -> tuple[nn.Module, GridReader] | None:
    """The module above an attention that shows the grid, and how: its block, or the model's first convolution."""
    for block in site.above[:-3:-1]:  # of Swin, XCiT; Swin v2 has a module more around its attention
        if (reader := _find_reader(block, ("input_dimensions",), ("H", "W"))) is not None:
            return block, reader
    if in_windows:
        return (site.above[-1], GridReader()) if site.above else None
    for module in reversed(site.above):
        embed: Any = next((part for path in _PATCHES if isinstance(part := reach(module, path), nn.Conv2d)), None)
        if embed is not None:
            return embed, GridReader()
    return None
