"""Which part of each image is the image, in a batch of images that padding makes equal in size."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mnemos.memory.stored import recomputing

Sizes = Sequence[tuple[int, int]]


class ValidPart:
    """The sizes of the images of the present call, between what pads them and the caches that summarise them.

    Images are in the upper left corner. The sizes hold until the call ends: what calls the backbone alone has other
    images. A repeated forward (activation checkpointing) reads the sizes of the last call, which has ended.
    """

    def __init__(self) -> None:
        self._images: Sizes = ()
        self._padded = (1, 1)
        self._ended = True

    def note(self, images: Sizes, padded: tuple[int, int]) -> None:
        """A call begins with images of these (height, width), padded to one size."""
        self._images, self._padded, self._ended = images, padded, False

    def end(self) -> None:
        """The call ends, with or without an error."""
        self._ended = True

    def at(self, grid: tuple[int, int]) -> Sizes | None:
        """The (height, width) of each image in tokens of a grid, with parts of tokens.

        None: no image is padded, or there is no call with images of known sizes.
        """
        if self._ended and not recomputing():
            return None
        if all(tuple(size) == self._padded for size in self._images):
            return None
        (rows, columns), (height, width) = grid, self._padded
        return [(max(1, -(-h * rows // height)), max(1, -(-w * columns // width))) for h, w in self._images]

    @staticmethod
    def mask(sizes: Sizes, grid: tuple[int, int], device: torch.device) -> Tensor:
        """Which tokens of the grid are of the image: [B, H·W] bool."""
        limits = torch.tensor(sizes, device=device)
        rows = torch.arange(grid[0], device=device) < limits[:, :1]
        columns = torch.arange(grid[1], device=device) < limits[:, 1:]
        return (rows[:, :, None] & columns[:, None]).flatten(1)
