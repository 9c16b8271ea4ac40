"""What smaller states cost in recall: the bits of a number, and the accuracy of trained models.

    mnemos bench-memory mqar --memories gated-delta,delta,mamba2 --out runs/mqar
    nice python benchmarks/state_bits.py RUN ... --out results/state_bits.json     two minutes a run on one core
    mnemos compare demo demo-linear demo-cached demo-memformer --out runs/demo
    nice python benchmarks/state_bits.py RUN ... --out results/state_bits_told.json

Each RUN is a folder of a trained run. Its test split is read in parts of `every` tokens; between two parts the state is
written and read as `mnemos.save_state` does it: exactly, in bfloat16, in int8 by rounding alone, and in int8 with the
error of the rounding kept. So a row of 64 tokens is written once (32 tokens a part) or 63 times (1), and one of 512,
longer than those of the training, 511 times. A task whose rows have no `length` to set, as `told`, has its own rows,
in parts of 32 and of 4.
"apart" is the mean over all counted targets of the Kullback-Leibler divergence in nats from the exact state's answers.
"""

from pathlib import Path

import torch
from command import command, write
from torch import Tensor, nn

from mnemos.config import to_dict
from mnemos.lab.run.recipe_files import recipe_of_model
from mnemos.lab.run.trained import open_run
from mnemos.lab.tasks.batch import IGNORE, Batch
from mnemos.state_file import _decode, _encode
from mnemos.types import State, map_state

PARTS = ((64, 32), (64, 1), (512, 1))  # tokens of a row, and of a part of it
OWN = ((0, 32), (0, 4))  # of rows whose length is the task's
KINDS = {"exact": None, "bfloat16": "bfloat16", "int8, rounding alone": "int8", "int8": "int8"}


class Kept:
    """A way to write a state, which counts what it writes."""

    def __init__(self, kind: str) -> None:
        self.kind, self.bits, self.numbers = kind, 0, 0

    def __call__(self, state: State) -> State:
        """The state as it is after it was written and read."""
        return map_state(self._leaf, state)

    def _leaf(self, x: Tensor) -> Tensor:
        stored = _encode(x, KINDS[self.kind])
        parts = dict(stored) if isinstance(stored, dict) else {"values": stored}
        if self.kind.endswith("alone") and isinstance(stored, dict):
            stored["error"] = torch.full_like(parts.pop("error"), 0x88)  # errors of 0, which need no bits
        if x.is_floating_point() and x.dim() > 1:
            self.bits += sum(8 * y.numel() * y.element_size() for y in parts.values() if isinstance(y, Tensor))
            self.numbers += x.numel()
        return _decode(stored)


def answers(model: nn.Module, batch: Batch, every: int, kept: Kept) -> tuple[Tensor, Tensor]:
    """Log-probabilities at the targets that count, and these targets; the rows are read in parts of `every` tokens."""
    state, said, asked = None, [], []
    for part, targets in zip(batch.inputs.split(every, 1), batch.targets.split(every, 1), strict=True):
        outputs, state = model(part, None if state is None else kept(state))
        counted = targets != IGNORE
        said.append(outputs[counted].log_softmax(-1))
        asked.append(targets[counted])
    return torch.cat(said), torch.cat(asked)


@torch.no_grad()
def measure(run: Path, length: int, every: int) -> list[dict]:
    longer = ["--data.length", str(length), "--model.max_length", str(length)] if length else []
    _, task, model = open_run(run, longer)
    rows, exact = [], []
    batches = list(task.batches("test", 250))
    for kind in KINDS:
        kept, right, count, apart = Kept(kind), 0, 0, 0.0
        for i, batch in enumerate(batches):
            said, targets = answers(model, batch, every, kept)
            if kind == "exact":
                exact.append(said)
            right, count = right + int((said.argmax(-1) == targets).sum()), count + len(targets)
            apart += float((exact[i].exp() * (exact[i] - said)).sum())
        where = {"run": "/".join(run.parts[-4:]), "length": length or task.max_length, "every": every, "kind": kind}
        found = {"accuracy": right / count, "targets": count, "apart": apart / count}
        rows.append({**where, **found, "bits": kept.bits / max(1, kept.numbers), "numbers": kept.numbers})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for run in options.runs:
        parts = PARTS if "length" in to_dict(recipe_of_model(run).data) else OWN
        rows += [row for length, every in parts for row in measure(run, length, every)]
    write(options.out, {"rows": rows})


if __name__ == "__main__":
    main()
