"""`RolloutTrainer`: Transformers' Trainer with states across updates and gradients through rollouts of segments."""

import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mnemos import libraries, tree_file
from mnemos.atomic import read_text
from mnemos.errors import InputError
from mnemos.memory_replay.distributed import average_gradients
from mnemos.memory_replay.engine import RolloutEngine

from .batches import RolloutBatches, RowStates
from .reader import Reader

libraries.transformers()
libraries.accelerate()
from accelerate.utils import gather_object  # noqa: E402
from transformers import Trainer  # noqa: E402
from transformers.trainer_utils import EvalLoopOutput  # noqa: E402

_REFUSED_ARGUMENTS = {
    "auto_find_batch_size": "the rows of a state cannot change in number",
    "torch_compile": "replay runs the model eagerly",
    "activation_checkpointing": "replay keeps the activations of one segment alone",
    "fsdp": "gradients are reduced once per rollout, by all processes alike; use torchrun without it",
    "deepspeed": "gradients are reduced once per rollout, by all processes alike; use torchrun without it",
    "parallelism_config": "each process reads whole rows with a whole model; use torchrun without it",
}


class RolloutTrainer(Trainer):
    """Train a recurrent, cached or remembering language model on documents of any length, in `transformers.Trainer`.

        trainer = RolloutTrainer(model=model, args=TrainingArguments("runs/there", per_device_train_batch_size=8),
                                 train_dataset=documents, segment=128, rollout=4)
        trainer.train()                                   # later: trainer.train(resume_from_checkpoint=True)

    Each of the 8 rows reads whole documents, one after the other (see `RolloutBatches`). An update reads the next
    rollout = S segments of L = segment tokens of every row, with gradient through all S by `mnemos.replay`, at the
    memory of one segment's activations. The rows' states go on to the next update, without gradient, and begin anew
    with each document. rollout=1 is back-propagation truncated at each segment. The loss is the mean of −log p in nats
    over all targets of the update, as in Trainer; an evaluation reads documents in the same way, with states, and gives
    the mean over all their targets.

    model: a `MnemosForCausalLM` or `RememberingForCausalLM`, a causal model of Transformers with a cache or a recurrent
    state (what `mnemos.functional` takes), also with gated caches of scope="stream", and any of these inside a
    `PeftModel`. train_dataset, eval_dataset: documents, mappings with "input_ids" (and "labels"). With
    gradient_accumulation_steps=k there are k times as many rows, and one update reads a rollout of all. In several
    processes (torchrun) each has rows of its own, and gradients are averaged by one all-reduce per update.

    A checkpoint holds the states and the place in the data, and training that is killed and resumed continues bit for
    bit. `resume_from_checkpoint=True` takes the newest checkpoint that is whole. verify: whether the
    first update compares what replay computes again with its first pass (`mnemos.replay`).
    named: the other arguments of Trainer.
    Raises InputError for a model without a causal state, for arguments that do not apply to rollouts, and where a
    checkpoint is of another model, of other data or of other settings.
    """

    model: Any
    train_dataset: Any
    eval_dataset: Any
    optimizer: Any

    def __init__(self, *positional: Any, segment: int, rollout: int, verify: bool = True, **named: Any) -> None:
        # --- before Trainer, which has errors of its own for some arguments, and changes the model's configuration ---
        for name in ("data_collator", "compute_loss_func", "compute_metrics"):
            if named.get(name) is not None:
                raise InputError(
                    f"RolloutTrainer: expected no {name}, because documents are cut into segments; omit it"
                )
        model = positional[0] if positional else named.get("model")
        args = positional[1] if len(positional) > 1 else named.get("args")
        for name in _REFUSED_ARGUMENTS:
            _refuse(name, getattr(args, name, None))
        smoothing = getattr(args, "label_smoothing_factor", 0.0)
        self._reader = None if model is None else Reader(model, smoothing)
        super().__init__(*positional, **named)
        # --- after it: what `accelerate launch` sets is not among the arguments ---
        _refuse("fsdp", self.is_fsdp_enabled)
        _refuse("deepspeed", self.is_deepspeed_enabled)
        _refuse("parallelism_config", getattr(self.accelerator, "parallelism_config", None))
        if self.args.n_gpu > 1:
            raise InputError(
                f"RolloutTrainer: expected one GPU per process, found {self.args.n_gpu}; start it with torchrun"
            )
        self.segment, self.rollout, self.verify = segment, rollout, verify
        self._resumed: Path | None = None

    def _present_reader(self) -> Reader:
        """How the present model is read; `model_init` may have made another one."""
        if self._reader is None or self._reader.model is not self.model:
            self._reader = Reader(self.model, self.args.label_smoothing_factor)
        return self._reader

    def get_train_dataloader(self) -> DataLoader:
        """The rollouts of the training documents, for this process."""
        if self.train_dataset is None:
            raise InputError("RolloutTrainer: expected train_dataset, a sequence of documents, found none")
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        batches = RolloutBatches(
            self.train_dataset,
            self._train_batch_size,
            self.segment,
            self.rollout,
            seed,
            self.args.gradient_accumulation_steps,
        )
        engine = RolloutEngine(self.accelerator.backward, self.model, verify=self.verify)
        self._rows = RowStates(batches, engine)
        if self._resumed is not None:
            saved = tree_file.read(self._resumed / self._files()[0])
            rows, device = self._train_batch_size, self.args.device
            self._rows.restore(saved, lambda: self._present_reader().fresh(rows, device), device)
        return self._loader(batches)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """The segments of the evaluation documents, each of them once, for this process."""
        documents = self.eval_dataset if eval_dataset is None else eval_dataset
        documents = self.eval_dataset[documents] if isinstance(documents, str) else documents
        if documents is None:
            raise InputError("RolloutTrainer: expected eval_dataset, a sequence of documents, found none")
        return self._loader(RolloutBatches(documents, self.args.eval_batch_size, self.segment, 1, None))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Refused: `evaluate` gives the loss of documents, `generate` of the model continues them."""
        raise InputError(
            "predict: expected evaluate(documents), whose result is the loss; predictions are not collected"
        )

    def _loader(self, batches: Any) -> DataLoader:
        return _Loader(
            batches,
            batch_sampler=_InOrder(len(batches)),
            collate_fn=operator.itemgetter(0),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type != "cpu",
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **named: Any) -> Any:
        """As in Trainer. True: resume from the newest checkpoint of `output_dir` that is whole."""
        start: Any = resume_from_checkpoint
        whole = f"a whole checkpoint of RolloutTrainer, written by {self.args.world_size} process(es)"
        if start is True:
            folder = Path(str(self.args.output_dir))
            numbered = [path for path in folder.glob("checkpoint-*") if path.name.partition("-")[2].isdigit()]
            # A process may have been killed before it wrote its part of the last one: what every process has.
            of_processes = gather_object([{path for path in numbered if self._is_whole(path)}])
            start = max(
                set.intersection(*of_processes), key=lambda path: int(path.name.partition("-")[2]), default=True
            )
            if start is True and any(folder.glob("checkpoint-*")):
                raise InputError(f"{folder}: expected {whole}, found none; name another, or remove them all")
        elif start and not self._is_whole(Path(start)):
            raise InputError(f"{start}: expected {whole}, found none; resume from another")
        self._resumed = Path(start) if isinstance(start, str | Path) else None
        return super().train(str(start) if self._resumed else start, *positional, **named)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """As in Trainer; the targets of the update are counted here, because they are shifted already."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        count = sum(((batch["targets"] >= 0).sum() for batch in batches), torch.zeros((), dtype=torch.int64)).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()
        return batches, count

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """The gradients of one rollout; see the class. Returns the loss that counts for this process."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        reader, batch = self._present_reader(), self._prepare_inputs(inputs)
        scale = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        count = num_items_in_batch.clamp(min=1) / scale
        with self.accelerator.no_sync(model=model), self.accelerator.autocast():
            loss = self._rows.backward(
                lambda segment, state: reader(segment, state, count),
                batch,
                reader.advance if reader.advances else None,
            )
        if self.accelerator.sync_gradients:
            average_gradients(self.model.parameters())
        return loss.detach()

    @torch.no_grad()
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The mean loss over all targets of all processes, in nats."""
        self.model.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        batches: Any = dataloader.dataset
        reader, rows = self._present_reader(), RowStates(batches)
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for batch in dataloader:
            with self.accelerator.autocast():
                loss = rows.read(lambda segment, state: reader(segment, state, 1.0), self._prepare_inputs(batch))
            total += torch.stack([loss.double(), (batch["targets"] >= 0).sum().double().to(loss.device)])
        total = self.accelerator.gather(total[None]).sum(0)
        predictions: Any = None
        metrics = {f"{metric_key_prefix}_loss": float(total[0] / total[1].clamp(min=1))}
        return EvalLoopOutput(predictions, None, metrics, len(batches.documents))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in Trainer; a checkpoint of the training also gets the states of this process's rows."""
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir is not None and not self.args.save_only_model:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            tree_file.write(Path(output_dir) / self._files()[0], self._rows.state_dict())

    def _is_whole(self, folder: Path) -> bool:
        """Whether this process wrote its files of a checkpoint, and the first one its last, trainer_state.json."""
        try:
            json.loads(read_text(folder / "trainer_state.json"))
        except (OSError, ValueError):
            return False
        return all((folder / name).is_file() for name in self._files())

    def _files(self) -> tuple[str, str]:
        """The files of a checkpoint that this process writes: the states of its rows, and Trainer's generators."""
        own = self.args.process_index
        return f"rows-{own}.safetensors", f"rng_state_{own}.pth" if self.args.world_size > 1 else "rng_state.pth"


def _refuse(name: str, value: object) -> None:
    """Raise InputError if an argument, or a setting of the launcher with its name, is given."""
    if value:
        raise InputError(f"RolloutTrainer: expected args without {name}, because {_REFUSED_ARGUMENTS[name]}")


class _InOrder:
    """The numbers of the batches of one epoch, each in a list of one."""

    def __init__(self, count: int) -> None:
        self._count, self._epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        return ([i] for i in range(self._epoch * self._count, (self._epoch + 1) * self._count))


class _Loader(DataLoader):
    def set_epoch(self, epoch: int) -> None:
        """Trainer calls it before each epoch; after a resumption, it finds the sampler by itself."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
