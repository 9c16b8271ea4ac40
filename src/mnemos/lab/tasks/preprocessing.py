"""The base class of preprocessings: how `mnemos predict` turns files into a model's inputs, and names its outputs."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mnemos.config import Config
from mnemos.types import InputError, JSONObject


class Predicted(NamedTuple):
    """What a model says about a file: the text that `mnemos predict` prints, and its details as JSON.

    problem: why the file could not be read, with its name; the text is "" then.
    """

    file: str
    text: str
    details: JSONObject = MappingProxyType({})  # type: ignore[assignment]
    problem: str = ""


@dataclass(frozen=True)
class Preprocessing(Config):
    """What a task knows that the model does not: how a new file becomes inputs, and the names of the outputs.

    `Task.preprocessing` returns one. A finished run saves it as JSON beside the model, so that predictions need no data
    set. A subclass is decorated with `mnemos.register`, so that the JSON names it, and defines `answer`.

    Attributes:
        names: of the model's classes or output tokens, in their order; () if they have none.
        options: the options of `mnemos predict` that the class takes, with their defaults.
        endings: of the names of files that are read in folders; (): of all. files: what they are, for errors.
    """

    kind: ClassVar[str] = "preprocessing"
    options: ClassVar[Mapping[str, int]] = MappingProxyType({})
    endings: ClassVar[tuple[str, ...]] = ()
    files: ClassVar[str] = "files"

    names: tuple[str, ...] = field(default=(), kw_only=True)

    def predict(self, model: Any, files: Sequence[Path], options: Mapping[str, int]) -> Iterator[Predicted]:
        """What the model says about each of the files and of the files in folders, in order.

        options: a value for each name in `options`. A file that cannot be read has a `Predicted` with a `problem`, and
        the files after it are predicted.
        """
        reader = self.reader(model)
        for path in self.paths(files):
            try:
                with torch.no_grad():
                    answer = self.answer(reader, path, options)
            except InputError as error:
                answer = Predicted(str(path), "", problem=str(error))
            yield answer

    def answer(self, reader: Any, path: Path, options: Mapping[str, int]) -> Predicted:
        """What the model says about a file. Raises InputError if it cannot be read."""
        raise NotImplementedError

    def reader(self, model: Any) -> Any:
        """What `answer` needs for every file; by default the model. Raises InputError for a model of another task."""
        return model

    def paths(self, files: Sequence[Path]) -> Sequence[Path]:
        return files_below(files, self.endings, self.files)

    def difference(self, other: "Preprocessing") -> str | None:
        """Why a model of this preprocessing cannot be scored on data of another, after "FOLDER: "; None if it can."""
        if self.names == other.names:
            return None
        first = next((a, b) for a, b in zip_longest(self.names, other.names) if a != b)
        return (
            f"expected data with the classes of the run, such as {first[0]!r}, found {first[1]!r}; name the class "
            "folders as the run's data do"
        )

    def start_problem(self, other: "Preprocessing") -> str | None:
        """Why no model for other data can start with weights of this, after "train.init_from: "; None if it can."""
        return None


def likely_classes(path: Path, logits: Tensor, names: Sequence[str], top: int) -> Predicted:
    """The `top` most probable classes of a file: {"classes": [{"name", "probability"}, …]}."""
    best = logits.float().softmax(-1).topk(min(top, len(names)))
    pairs = [(names[i], value) for value, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
    details = {"classes": [{"name": name, "probability": value} for name, value in pairs]}
    return Predicted(str(path), "  ".join(f"{name} {value:.3f}" for name, value in pairs), details)


def files_below(paths: Sequence[Path], endings: tuple[str, ...], what: str) -> list[Path]:
    """The paths that are no folders, and the files of folders with these endings (or all), sorted, no hidden ones."""
    every: list[Path] = []
    for path in paths:
        if not path.is_dir():
            every.append(path)
            continue
        below = []
        for here, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            below += [Path(here, n) for n in names if n.lower().endswith(endings or "") and not n.startswith(".")]
        if not below:
            which = f" ({' '.join(endings)})" if endings else ""
            raise InputError(f"{path}: expected {what}{which}, found none; name another folder")
        every += sorted(below)
    return every
