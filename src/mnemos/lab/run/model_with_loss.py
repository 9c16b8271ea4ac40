"""Model and loss in one forward: what DDP and FSDP wrap."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mnemos.lab.tasks.metrics import called, sum_functions
from mnemos.lab.tasks.task import Task
from mnemos.memory_replay.engine import read_in_turn
from mnemos.types import Advances, State, collect_auxiliary_losses, leaves


class StateBox:
    """The state that goes into a wrapped model, and those that come out of it, one for each segment.

    The wrappers (precision, DDP, FSDP) convert tensors and pytrees that are passed through them, and leave this object:
    a state stays in float32 under bfloat16 weights too.
    """

    __slots__ = ("after", "before")

    def __init__(self, before: State) -> None:
        self.before = before
        self.after: list[State] = []


class ModelWithLoss(nn.Module):
    """Model and loss in one forward.

    A segment without a counted target is read by the model's `advance`, if it has one. With several processes (`alone`
    is False) every segment takes the whole forward: the rows of another process may have targets, and all must run the
    same parts. searched: DDP searches each forward for parameters without a gradient, and prints a warning if there are
    none; one parameter that is never used, and is not the model's, prevents it.
    """

    def __init__(self, model: nn.Module, task: Task, alone: bool, searched: bool = False) -> None:
        super().__init__()
        if searched:
            self._never_used = nn.Parameter(torch.zeros(1))
        self.model, self.task = model, task
        self._skips = alone and isinstance(model, Advances)
        self._functions = sum_functions(task.metrics, training=True)

    def reads(self, batch: object) -> bool:
        """Whether a batch takes the model's whole forward, and not `advance`."""
        return not self._skips or self.task.count(batch) > 0

    def forward(
        self,
        batches: Sequence[object],
        box: StateBox,
        weights: tuple[float, float] = (1.0, 0.0),
        visible: bool = False,
        advance: bool = False,
    ) -> tuple[Tensor, ...]:
        """(loss, sums) of successive batches; the states are written to `box.after`.

        weights: of the losses and of the auxiliary losses. loss: their weighted sum, a scalar. sums, without gradient:
        [weight × Σ auxiliary losses, their number, the sums of the task's metrics]. visible: something that depends on
        the last state, which will get a gradient, is returned too, by which DDP finds used parameters. advance: only
        compute the new states, and return ().
        """
        added: list[Tensor] = []
        sums: list[Tensor] = []

        def step(batch: object, state: State) -> tuple[Tensor | None, State]:
            if advance or not self.reads(batch):
                return None, self.task.advance(self.model, batch, state)
            with collect_auxiliary_losses() as auxiliary:
                outputs, state = self.task.forward(self.model, batch, state)
                loss = self.task.loss(self.model, outputs, batch)
            added.extend(auxiliary)
            with torch.no_grad():
                functions = self._functions.items()
                own = [x for f, width in functions for x in called(f, width, self.model, outputs, batch)]
            if own:
                sums.append(torch.stack([x.to(loss.device, torch.float32) for x in own]))
            return loss, state

        with collect_auxiliary_losses():  # auxiliary losses that `advance` or a metric adds are dropped
            every, box.after = read_in_turn(step, ((x, self.task.resets(x)) for x in batches), box.before)
        if advance:
            return ()
        losses = [loss for loss in every if loss is not None]
        device = leaves(batches[-1])[0].device
        none = torch.zeros((), device=device)
        loss, extra = torch.stack(losses or [none]).sum() * weights[0], none
        if added:
            extra = torch.stack([x.to(loss.dtype) for x in added]).sum() * weights[1]
            loss = loss + extra
        head = torch.stack([extra.detach().to(device, torch.float32), torch.full_like(none, len(added))])
        zeros = torch.zeros(sum(self._functions.values()), device=device)
        summed = torch.cat([head, torch.stack(sums).sum(0) if sums else zeros])
        if not visible:
            return loss, summed
        # DDP finds the used parameters from the tensors that a forward returns. These scalars have no other use.
        return loss, summed, *(x.flatten()[:1].sum() for x in leaves(box.after[-1]) if x.requires_grad)
