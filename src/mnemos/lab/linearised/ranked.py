"""Which attentions of a decoder a hybrid leaves whole, ranked on its training text: `mnemos linearise --full 8`."""

import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mnemos.atomic import write_json
from mnemos.errors import say
from mnemos.hosts.ranking import WindowLoss, choose_heads, rank, rank_heads, show_heads
from mnemos.lab.errors import Interrupted
from mnemos.lab.run.files import read_object
from mnemos.lab.run.progress import progress
from mnemos.types import InputError, JSONObject

from .settings import HEADS, LinearisedConfig
from .text_batches import Pieces

LOSSES = "ranking.json"  # of a run: every loss that was measured
# Pieces that are read, their tokens at most (or twice the window), and those before the first that counts.
PIECES, LENGTH, FIRST = 3, 2048, 512


class KeptLoss(WindowLoss):
    """A `WindowLoss` whose measurements are kept in a file: after an interrupt it goes on, with the same numbers.

    about: what the measurements depend on. Raises InputError if the file has those of something else.
    """

    def __init__(self, path: Path, about: JSONObject, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.path = path
        self.kept: JSONObject = read_object(path) if path.is_file() else {"about": about, "losses": {}}
        if self.kept["about"] != about:
            raise InputError(f"{path}: expected losses of {about}, found those of {self.kept['about']}; name another")
        self._wanted: Collection[str] | None = None

    def __call__(self, full: Collection[str], keep: bool = False) -> Tensor:
        if keep:
            self._wanted = [*full]
        key = "".join("x" if name in full else "-" for name in self.names)
        return self._loss(key, lambda: WindowLoss.__call__(self, full))

    def with_heads(self, whole: Mapping[str, Collection[int]]) -> Tensor:
        key = " ".join("".join(map(str, sorted(whole.get(name, ())))) or "-" for name in self.names)
        return self._loss(key, lambda: WindowLoss.with_heads(self, whole))

    def _loss(self, key: str, measure: Callable[[], Tensor]) -> Tensor:
        if key not in self.kept["losses"]:
            # What is held of the rows is computed when a loss is needed that the file does not have, and not before:
            # a run that goes on reads what it measured, which takes no time.
            if self._wanted is not None:
                super().__call__(self._wanted, keep=True)
                self._wanted = None
            self.kept["losses"][key] = measure().tolist()
            write_json(self.path, self.kept)
        return torch.tensor(self.kept["losses"][key], dtype=torch.float64)


def choose_full(
    decoder: Any, pieces: Pieces, settings: LinearisedConfig, about: JSONObject, folder: Path, quiet: bool
) -> tuple[str, ...]:
    """The `settings.full` attentions, or key heads, that a decoder needs most on the pieces its training reads last.

    about: the SHA-256 of the decoder and of the text. Raises InputError where it has fewer.
    """
    count, by_heads = settings.full_count or 0, settings.full[1:] == HEADS
    window, sinks = settings.window, settings.sinks
    numbers = [*dict.fromkeys([*pieces.numbers[1 - PIECES :], pieces.held_out])]
    rows = [pieces.ids[i, : max(LENGTH, 2 * window)] for i in numbers]
    first = min(FIRST, len(rows[0]) // 4)
    about = {**about, "window": window, "sinks": sinks, "first": first, "pieces": numbers}
    folder.mkdir(parents=True, exist_ok=True)
    with (
        KeptLoss(folder / LOSSES, about, decoder, rows, window, sinks, first) as loss,
        progress(quiet, folder.name, 0, 0) as display,
    ):
        attentions, heads = len(loss.names), sum(loss.kv_heads.values())
        most, kind = (heads, "key heads") if by_heads else (attentions, "attentions")
        if count >= most:
            raise InputError(f"full: expected fewer than the {most} {kind} of the decoder, found {count}; lower it")
        every = range(1 + (heads if by_heads else attentions * (attentions + 1) // 2))
        if not quiet:
            say(
                f"ranking {most} {kind} by {len(every)} losses on {len(rows)} pieces of {len(rows[0]):,} tokens, "
                f"kept in {folder / LOSSES}: after an interrupt the same command goes on; --full NAMES ranks nothing",
                file=sys.stderr,
                flush=True,
            )
        steps = display.evaluation("the ranking", len(every), every, lambda _: 1, "losses")
        try:
            if by_heads:
                lost = rank_heads(loss, lambda *_: next(steps, None))
                names, said = choose_heads(lost, count), show_heads(lost, count)
            else:
                ranking = rank(loss, jointly=True, heads=False, progress=lambda *_: next(steps, None))
                names, said = ranking.full(count), str(ranking)
        except KeyboardInterrupt:
            done = len(read_object(folder / LOSSES)["losses"])
            raise Interrupted(f"interrupted; the same command continues after loss {done} of {len(every)}") from None
    if not quiet:
        say(said, file=sys.stderr)
    return names
