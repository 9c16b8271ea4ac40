"""`RolloutModule`: rollouts of segments in Lightning, as a base class beside LightningModule."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.memory_replay.distributed import average_gradients
from mnemos.memory_replay.engine import RolloutEngine
from mnemos.modes import evaluating
from mnemos.types import InputError, JSONObject, State

from .batches import RolloutBatch, RolloutBatches, RowStates, Segment

if TYPE_CHECKING:
    from .reader import Reader

_SAVED = "mnemos_rollouts"  # the entry of a checkpoint


class RolloutModule:
    """Truncated back-propagation through time in Lightning: states across updates, gradients through rollouts.

        class Language(mnemos.trainers.RolloutModule, lightning.LightningModule):     # in this order
            def __init__(self):
                super().__init__()
                self.model = MambaForCausalLM(config)

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), 1e-3)

        trainer.fit(Language(), RolloutBatches(documents, rows=8, segment=128, rollout=4))

    Every batch of `RolloutBatches` is one update: its segments are read by `segment_loss`, by default those of
    `self.model` (see `RolloutTrainer` for which models), with gradient through all of them by `mnemos.replay` at the
    memory of one segment. The states go on to the next batch, without gradient. The loss, logged as `train_loss`, is
    the mean over the targets of all processes. Gradients are averaged by one all-reduce per update. Optimisation is
    manual: clip in `on_before_optimizer_step`, as in `self.clip_gradients(optimizer, 1.0)`; schedulers of
    `configure_optimizers` step by their interval and frequency, but for a ReduceLROnPlateau: step it yourself in
    `on_validation_epoch_end`, with `self.trainer.callback_metrics["val_loss"]`, unless `self.trainer.sanity_checking`.
    Validation by `RolloutBatches(documents, rows, segment, seed=None)` logs `val_loss`, the mean over all targets.

    A checkpoint also holds the states and the place of every process's rows, and all random generators, which Lightning
    leaves out: `trainer.fit(module, batches, ckpt_path=...)` continues bit for bit. Another `fit` with the same batches
    goes on with them; with others all rows begin anew. One optimiser; one device, or several with the strategy "ddp".
    It works with `lightning` and with `pytorch_lightning`. verify, an attribute of the class: whether the first
    update compares what replay computes again with its first pass (`mnemos.replay`).
    Raises InputError for other loaders and strategies, and for a checkpoint of other data or another model.
    """

    verify: bool = True
    trainer: Any
    model: nn.Module
    optimizers: Callable[[], Any]
    manual_backward: Callable[[Tensor], object]
    log: Callable[..., object]
    lr_scheduler_step: Callable[[Any, Any], object]
    device: torch.device
    parameters: Callable[[], Iterator[nn.Parameter]]

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self.automatic_optimization = False
        self._reader: Reader | None = None
        self._rows: RowStates | None = None
        self._validated: RowStates | None = None
        self._restored: JSONObject | None = None

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        bases = [base.__name__ for base in cls.__mro__]
        if "LightningModule" in bases[: bases.index("RolloutModule")]:
            raise InputError(
                f"{cls.__name__}: expected RolloutModule before LightningModule, whose methods it replaces; write "
                f"class {cls.__name__}(RolloutModule, LightningModule)"
            )

    def segment_loss(self, segment: Segment, state: State, count: Tensor) -> tuple[Tensor, State]:
        """(the losses of a segment's targets, summed and divided by `count`; the new state). Override it at will."""
        from .reader import Reader  # which imports transformers

        if not isinstance(getattr(self, "model", None), nn.Module):
            raise InputError(
                f"{type(self).__name__}: expected a language model as self.model, found none; assign it in __init__, "
                "or override segment_loss"
            )
        if self._reader is None or self._reader.model is not self.model:
            try:
                self._reader = Reader(self.model)
            except InputError as error:
                how = "another recurrent model overrides segment_loss(segment, state, count)"
                raise InputError(f"{type(self).__name__}: {error}; {how}") from None
        return self._reader(segment, state, count)

    def on_train_start(self) -> None:
        """Begin the rows, or go on with those of the checkpoint."""
        # --- what it can train on ---
        batches, strategy = self.trainer.train_dataloader, self.trainer.strategy
        if not isinstance(batches, RolloutBatches):
            raise InputError(
                f"RolloutModule: expected RolloutBatches to train on, found {type(batches).__name__}; give fit "
                "mnemos.trainers.RolloutBatches(documents, rows, segment, rollout)"
            )
        if batches.sets != 1:
            raise InputError(f"RolloutModule: expected batches of one set of rows, found {batches.sets}; use sets=1")
        if self.trainer.world_size > 1 and not isinstance(strategy.model, nn.parallel.DistributedDataParallel):
            raise InputError(f'RolloutModule: expected the strategy "ddp", found {type(strategy).__name__}')
        # --- the rows, begun or from a checkpoint ---
        module: Any = self
        if self._rows is None or self._rows.batches is not batches:
            self._rows = RowStates(batches, RolloutEngine(self.manual_backward, module, verify=self.verify))
        if self.trainer.ckpt_path is None:  # a checkpoint that was read for its weights alone
            self._restored = None
        if self._restored is not None:
            of_processes = self._restored["rows"]
            if len(of_processes) != self.trainer.world_size:
                raise InputError(
                    f"RolloutModule: expected {len(of_processes)} processes, with which the checkpoint was written, "
                    f"found {self.trainer.world_size}; resume with as many"
                )
            ids = torch.zeros(batches.rows, batches.segment, dtype=torch.int64, device=self.device)

            def fresh() -> State:  # with the structure of the states that `segment_loss` returns
                # In eval mode, as running statistics are not the state's.
                with torch.no_grad(), generators.preserve(), evaluating(module):
                    return self.segment_loss(Segment(ids, ids), None, torch.ones((), device=self.device))[1]

            self._rows.restore(of_processes[self.trainer.global_rank], fresh, self.device)
        self._rows.follow()

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        """One update from one rollout."""
        if self._rows is None:
            raise InputError(f"{type(self).__name__}.on_train_start: expected a call of super().on_train_start()")
        if self._restored is not None:  # now, so that nothing since the start has drawn from them
            generators.put(self._restored["generators"][self.trainer.global_rank])
            self._restored = None
        optimizer, wrapped, world = self.optimizers(), self.trainer.strategy.model, self.trainer.world_size
        if isinstance(optimizer, list):
            raise InputError(f"RolloutModule: expected one optimiser, found {len(optimizer)}")
        own_targets = (batch["targets"] >= 0).sum()
        all_targets = own_targets.clone()
        if world > 1:
            torch.distributed.all_reduce(all_targets)
        count = all_targets.clamp(min=1) / world  # the mean over processes
        optimizer.zero_grad()
        with wrapped.no_sync() if hasattr(wrapped, "no_sync") else contextlib.nullcontext():
            loss = self._rows.backward(lambda segment, state: self.segment_loss(segment, state, count), batch)
        average_gradients(self.parameters())
        optimizer.step()
        self._step_schedulers("step", batch_idx)
        # Each process divides by the mean count, so the mean of their losses is the mean over all targets.
        self.log("train_loss", loss, batch_size=int(own_targets), sync_dist=True, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        """Step the schedulers whose interval is an epoch."""
        self._step_schedulers("epoch", self.trainer.current_epoch)

    def _step_schedulers(self, interval: str, index: int) -> None:
        """Step the schedulers of an interval after its number `index`, from 0."""
        for config in self.trainer.lr_scheduler_configs:
            # Which metric it reads, Lightning does not keep in manual optimisation.
            plateau = isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            if config.interval == interval and not plateau and (index + 1) % config.frequency == 0:
                self.lr_scheduler_step(config.scheduler, None)

    def on_validation_epoch_start(self) -> None:
        """New rows for the validation."""
        batches = self.trainer.val_dataloaders
        if not isinstance(batches, RolloutBatches) or batches.seed is not None:
            found = "one with a seed" if isinstance(batches, RolloutBatches) else type(batches).__name__
            raise InputError(f"RolloutModule: expected RolloutBatches(..., seed=None) to validate on, found {found}")
        self._validated = RowStates(batches)

    def validation_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        """Log the loss of a batch; Lightning takes the mean, weighted by the targets."""
        if self._validated is None:
            name = "on_validation_epoch_start"
            raise InputError(f"{type(self).__name__}.{name}: expected a call of super().{name}()")
        count = (batch["targets"] >= 0).sum()
        loss = self._validated.read(lambda segment, state: self.segment_loss(segment, state, count.clamp(min=1)), batch)
        self.log("val_loss", loss, batch_size=int(count), on_epoch=True, sync_dist=True, prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the rows and the generators of all processes."""
        if self._rows is not None:
            own = self._rows.state_dict(), generators.take()
            of_processes: list[Any] = [own] * self.trainer.world_size
            if len(of_processes) > 1:
                torch.distributed.all_gather_object(of_processes, own)
            rows, states = zip(*of_processes, strict=True)
            checkpoint[_SAVED] = {"rows": list(rows), "generators": list(states)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep them until the training starts."""
        self._restored = checkpoint.get(_SAVED)
