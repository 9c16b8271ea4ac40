"""A copy of a run's metrics.jsonl for TensorBoard (`TrainConfig.log`). metrics.jsonl stays the record."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from mnemos import libraries

from .files import Measurement


class TensorBoard:
    """Event files in RUN/tensorboard, of a run that continues after the checkpoint of `step` (0: that starts).

    They hold each line of metrics.jsonl once, which must have been trimmed to that step already.
    """

    def __init__(self, folder: Path, step: int) -> None:
        libraries.tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops what earlier files have from purge_step on, also the line of that step, which was kept.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
        if (folder / Measurement.FILE).exists():
            self.write([line for line in Measurement.read_all(folder) if line.step >= step])

    def write(self, lines: Sequence[Measurement]) -> None:
        """Add each number of the lines as a scalar at the line's step."""
        for line in lines:
            for name, value in scalars(line):
                self._writer.add_scalar(name, value, line.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def scalars(line: Measurement) -> Iterator[tuple[str, float]]:
    """The numbers of a line of metrics.jsonl with names such as train/loss, or gates/blocks.0.attention/mix/0."""
    yield from _numbers(line.values, line.kind)


def _numbers(value: object, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(part, f"{name}/{key}")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            own = part.get("name") if isinstance(part, dict) else None
            yield from _numbers(part, f"{name}/{own or i}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)
