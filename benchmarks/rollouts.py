"""One update of a Mamba through a rollout of segments: replay beside `torch.utils.checkpoint` and mamba.py's.

    python benchmarks/rollouts.py [--segments 8 32 128] [--rounds 3] [--out results/rollouts.json]

mamba.py (alxndrTL/mamba.py, pull request 80, 2026-04; the package on the index, of 2024, lacks it) keeps the
states at the segments' boundaries in one autograd function, and runs each segment again in the backward pass. It is
written here from that idea: `Sequence` returns the hidden states of all segments, and the caller computes the loss. For
each segment its source runs the backward pass twice, once for the state and the inputs and once for the parameters.
`torch.utils.checkpoint` is called once a segment. All ways run one model, a Mamba of Transformers by
`mnemos.functional`, so the methods alone differ, and not mamba.py's parallel scan.

The gradients of all ways are compared first. Then CPU seconds of an update's gradients, one thread, float32, medians of
rounds that take turns; and the peak of the process's memory beyond what it used before.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from command import command, write
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mnemos
from mnemos._compat import pytree
from mnemos.lab.measure.peak import peak_of
from mnemos.lab.measure.timing import race
from mnemos.libraries import transformers
from mnemos.memory_replay.engine import RolloutEngine
from mnemos.trainers import RolloutBatches
from mnemos.trainers.batches import RowStates, segments
from mnemos.trainers.reader import Reader

ROWS, SEGMENT, VOCABULARY = 2, 64, 256
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "state_size": 16}


class Sequence(torch.autograd.Function):
    """The outputs of all segments, with the graph of none: read(x, state) -> (y, state) runs again in the backward."""

    @staticmethod
    def forward(ctx: Any, read: Callable[..., Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.read, ctx.states, outputs = read, [None], []
        ctx.save_for_backward(*inputs)
        for x in inputs:
            y, state = read(x, ctx.states[-1])
            outputs.append(y)
            ctx.states.append(state)
        ctx.states.pop()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        later: list[Tensor | None] = []
        back: list[Tensor | None] = []
        for x, grad in reversed(list(zip(ctx.saved_tensors, grads, strict=True))):
            found, structure = pytree.tree_flatten(ctx.states.pop())
            found = [y.detach().requires_grad_(y.is_floating_point()) for y in found if isinstance(y, Tensor)]
            x, given = x.detach().requires_grad_(), [y for y in found if y.requires_grad]
            with torch.enable_grad():
                y, state = ctx.read(x, pytree.tree_unflatten(found, structure) if found else None)
            after = [y for y in pytree.tree_leaves(state) if y.is_floating_point()] if later else []
            roots, gradients = [y, *after], [grad, *later]
            wanted = torch.autograd.grad(roots, [*given, x], gradients, retain_graph=True)
            torch.autograd.backward(roots, gradients)
            later = list(wanted[:-1])
            back.append(wanted[-1])
        return None, *reversed(back)


def made() -> Any:
    library = transformers()
    torch.manual_seed(0)
    return library.MambaForCausalLM(library.MambaConfig(vocab_size=VOCABULARY, **SIZES))


def ways(model: Any, count: int) -> dict[str, Callable[[], Tensor]]:
    """What adds the gradients of an update through so many segments to those of the model."""
    documents = [torch.randint(VOCABULARY, (count * SEGMENT + 1,)) for _ in range(ROWS)]
    batches = RolloutBatches(documents, ROWS, SEGMENT, count, seed=None)
    batch, reader, total = batches[0], Reader(model), float(ROWS * count * SEGMENT)
    body, head, embedding = mnemos.functional(model.backbone), model.lm_head, model.get_input_embeddings()

    def scored(outputs: list[Tensor]) -> Tensor:
        losses = [
            F.cross_entropy(head(y).flatten(0, 1), s.targets.flatten(), reduction="sum")
            for y, s in zip(outputs, segments(batch, SEGMENT), strict=True)
        ]
        loss = torch.stack(losses).sum() / total
        loss.backward()
        return loss.detach()

    def through(read: Callable[..., Any]) -> Callable[[], Tensor]:
        def way() -> Tensor:
            outputs, state = [], None
            for s in segments(batch, SEGMENT):
                y, state = read(embedding(s.input_ids), state)
                outputs.append(y)
            return scored(outputs)

        return way

    def sequence() -> Tensor:
        return scored(list(Sequence.apply(body, *(embedding(s.input_ids) for s in segments(batch, SEGMENT)))))

    def replayed() -> Tensor:
        rows = RowStates(batches, RolloutEngine(module=model))
        return rows.backward(lambda s, state: reader(s, state, total), batch)

    return {
        "back-propagation": through(body),
        "torch.utils.checkpoint": through(partial(checkpoint, body, use_reentrant=False)),
        "mamba.py": sequence,
        "replay": replayed,
    }


def gradients(model: nn.Module, way: Callable[[], Tensor]) -> Tensor:
    model.zero_grad()
    way()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def cleared(model: nn.Module, way: Callable[[], Tensor]) -> None:
    """What is timed: no gradients are left from the way before."""
    model.zero_grad()
    way()


def measured(count: int, rounds: int) -> dict[str, Any]:
    """Seconds, bytes and difference of gradients per way."""
    model = made()
    found = ways(model, count)
    expected = gradients(model, found["back-propagation"])
    result: dict[str, Any] = {}
    for name, way in found.items():
        difference = float((gradients(model, way) - expected).norm() / expected.norm())
        assert difference < 1e-5, f"{name}: gradients differ by {difference}"
        model.zero_grad()
        result[name] = {"difference": difference, "peak_bytes": peak_of(way)}
    times = race({name: partial(cleared, model, way) for name, way in found.items()}, rounds, time.process_time, 0.0)
    for name, row in result.items():
        row["seconds"] = statistics.median(times[name])
        row["range"] = [min(times[name]), max(times[name])]
        peak = row["peak_bytes"]
        print(
            f"{count:3} segments  {name:22} {row['seconds']:7.2f} s  "
            f"{'?' if peak is None else f'{peak / 2**20:8.0f}'} MiB  gradients differ by {row['difference']:.0e}",
            flush=True,
        )
    return result


def main() -> None:
    parser = command(__doc__, segments=[8, 32, 128], rounds=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    segments = {str(count): measured(count, options.rounds) for count in options.segments}
    write(options.out, {"rows": ROWS, "segment": SEGMENT, "model": SIZES, "segments": segments})


if __name__ == "__main__":
    main()
