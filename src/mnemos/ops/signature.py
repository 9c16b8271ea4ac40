"""What the tensors of a call must be, a line each; one checker for every operator and layer."""

import torch
from torch import Tensor

from mnemos.errors import InputError

MOST = 1024  # combinations of shapes that are remembered


class Signature:
    """The shapes and types of an operator's tensors, checked when it is called with them by name.

        check = Signature("delta_rule", q="B T K D", v="B T H M", decay="B T H | B T H D ?", mask="B T bool ?")
        sizes = check(q=q, v=v, decay=decay, mask=mask)      # {"B": 2, "T": 16, …}

    A letter is a size, the same wherever it stands. Tensors are floating, or what the line ends with (bool, int). `|`
    is either shape, `?` may be None. All are on one device. `advice` ends every error.
    """

    def __init__(self, name: str, advice: str = "", **lines: str) -> None:
        self.name, self.advice = name, advice
        self._lines = {arg: self._parse(line) for arg, line in lines.items()}
        self._accepted: dict[tuple[object, ...], dict[str, int]] = {}

    @staticmethod
    def _parse(line: str) -> tuple[list[list[str]], str, bool]:
        """The shapes, the type, and whether it may be None."""
        words = line.replace("?", " ").split()
        dtype = words.pop() if words[-1] in ("bool", "int") else "floating"
        return [shape.split() for shape in " ".join(words).split("|")], dtype, "?" in line

    def __call__(self, **tensors: Tensor | None) -> dict[str, int]:
        """The sizes by letter. Raises InputError for the first tensor that does not fit."""
        if torch.compiler.is_compiling():  # its sizes may be symbols, which a look-up would make constants
            return self._check(tensors)
        # A decoder calls with the same shapes for every token: a look-up takes a fifth of the time of the check.
        try:
            key = (*tensors, *[x if x is None else (x.shape, x.dtype, x.device) for x in tensors.values()])
            sizes = self._accepted.get(key)
        except (AttributeError, TypeError):  # what is no tensor, and a tracer's symbols
            return self._check(tensors)
        if sizes is None:
            sizes = self._check(tensors)
            if len(self._accepted) == MOST:
                self._accepted.clear()
            self._accepted[key] = sizes
        return sizes

    def _check(self, tensors: dict[str, Tensor | None]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        device = None
        for arg, x in tensors.items():
            shapes, dtype, optional = self._lines[arg]
            if x is None and optional:
                continue
            if not isinstance(x, Tensor) or not _has_type(x, dtype):
                raise self._error(arg, x, sizes)
            for shape in shapes:
                if len(shape) == x.dim() and all([sizes.get(n, size) == size for n, size in zip(shape, x.shape)]):  # noqa: B905
                    sizes.update(zip(shape, x.shape))  # noqa: B905
                    break
            else:
                raise self._error(arg, x, sizes)
            device = device or x.device
            if x.device != device:
                raise InputError(
                    f"{self.name}: expected all tensors on one device, found {device} and for {arg} {x.device}; move "
                    "them with .to(device)"
                )
        return sizes

    def _error(self, arg: str, x: object, sizes: dict[str, int]) -> InputError:
        shapes, dtype, optional = self._lines[arg]
        wanted = " or ".join("[" + ", ".join(f"{n}={sizes[n]}" if n in sizes else n for n in s) + "]" for s in shapes)
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else repr(x)[:60]
        none = " or None" if optional else ""
        return InputError(f"{self.name}: expected {dtype} {arg} {wanted}{none}, found {got}{self.advice}")


def _has_type(x: Tensor, dtype: str) -> bool:
    if dtype == "bool":
        return x.dtype is torch.bool
    return x.is_floating_point() if dtype == "floating" else not (x.is_floating_point() or x.dtype is torch.bool)
