"""Small models of every kind that a RolloutTrainer takes, documents, and plain back-propagation through time."""

import os
import signal
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import mnemos
from mnemos.hugging_face import MnemosForCausalLM, RememberingForCausalLM
from mnemos.libraries import transformers
from mnemos.trainers import RolloutTrainer
from mnemos.types import detach

VOCABULARY, SEGMENT, ROLLOUT = 30, 4, 3
LENGTHS = (9, 26, 2, 14, 21, 5, 1, 33)


def documents(seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(VOCABULARY, (n,), generator=generator).tolist()} for n in LENGTHS]


def _llama(**options: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    library = transformers()
    config = library.MistralConfig if "sliding_window" in options else library.LlamaConfig
    return getattr(library, config.__name__.replace("Config", "ForCausalLM"))(
        config(vocab_size=VOCABULARY, num_key_value_heads=1, max_position_embeddings=64, **sizes, **options)
    )


def mamba() -> Any:
    library = transformers()
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "state_size": 4}
    return library.MambaForCausalLM(library.MambaConfig(vocab_size=VOCABULARY, **sizes))


def cached() -> Any:
    model = _llama(sliding_window=5)
    mnemos.cache(model, mnemos.GRC(scope="stream", length=4, block=3))
    return model


def remembering() -> Any:
    return RememberingForCausalLM.of(mnemos.remember(_llama(), 2), segment=SEGMENT)


def memformer() -> Any:
    sizes = {"dim": 16, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "mlp": 20}
    return MnemosForCausalLM.of(mnemos.Memformer(vocab_size=VOCABULARY, segment=SEGMENT, **sizes))


LINEAR: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "dim": 16, "layers": 2, "num_heads": 2, "mlp": 20, "dropout": 0.2},
    "attention": mnemos.LinearConfig(),
}


def linear() -> Any:
    return MnemosForCausalLM.of(mnemos.Transformer(**LINEAR))


MODELS = {f.__name__: f for f in (mamba, cached, remembering, memformer, linear)}


def made(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.train()


def read_again(name: str, folder: Any) -> Any:
    """The model of that name which was saved there."""
    kind = transformers().AutoModelForCausalLM
    return mnemos.hosts.from_pretrained(kind, folder) if name == "cached" else kind.from_pretrained(folder)


def arguments(folder: Any, **named: Any) -> Any:
    """Those of Trainer, for two rows on the CPU."""
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    options = {"per_device_train_batch_size": 2, "use_cpu": True, "learning_rate": 1e-2}
    return transformers().TrainingArguments(
        str(folder), **{**quiet, **options, "lr_scheduler_type": "constant", **named}
    )


def trainer_of(model: Any, folder: Any, data: Any = None, evaluated: Any = None, **named: Any) -> Any:
    """A trainer on documents, with these arguments."""
    data = documents() if data is None else data
    sets = {"train_dataset": data, "eval_dataset": evaluated}
    return RolloutTrainer(model=model, args=arguments(folder, **named), segment=SEGMENT, rollout=ROLLOUT, **sets)


def own_step(model: Any) -> Any:
    """`outputs, state = step(ids, state)`, without the trainer."""
    if hasattr(model, "remembering"):
        return lambda ids, state: model.model(ids, state)
    return model.model if isinstance(model, MnemosForCausalLM) else mnemos.functional(model)


def through_time(step: Any, batch: dict[str, Any], state: Any) -> tuple[Tensor, Any]:
    """Σ −log p of a rollout with its whole graph, one segment at a time; rows of new documents read alone."""
    total: Any = 0
    ids, targets = batch["input_ids"].split(SEGMENT, 1), batch["targets"].split(SEGMENT, 1)
    for t, (x, y) in enumerate(zip(ids, targets, strict=True)):
        if state is not None and batch["resets"][:, t].any():
            state = mnemos.reset(state, batch["resets"][:, t])
        outputs, state = step(x, state)
        total = total + F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)
    return total, state


def back_propagated(model: Any, batches: Any, updates: int, update: Any = lambda: None) -> list[list[Any]]:
    """The gradients of so many batches, each from the state of the last; update(): after each of them."""
    step, state, found = own_step(model), None, []
    for index in range(updates):
        model.zero_grad()
        total, state = through_time(step, batches[index], detach(state) if state is not None else None)
        (total / (batches[index]["targets"] >= 0).sum()).backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        update()
    return found


@torch.no_grad()
def loss_of_each_alone(model: Any, documents: list[dict[str, Any]]) -> float:
    """The mean of −log p of all targets, of documents that are read by themselves."""
    step, total, count = own_step(model.eval()), 0.0, 0
    for document in documents:
        ids, state = torch.tensor([document["input_ids"]]), None
        for x, y in zip(ids[:, :-1].split(SEGMENT, 1), ids[:, 1:].split(SEGMENT, 1), strict=True):
            if y.numel():
                outputs, state = step(x, state)
                total += float(F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="sum"))
                count += y.numel()
    return total / count


class _Kill(transformers().TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def accumulated(folder: Any) -> Any:
    """A trainer with two sets of rows and dropout, whose epochs are of three updates."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}
    return trainer_of(made("linear"), folder, **options)


def killed(folder: Any) -> None:
    """Train until the process is killed, with gradients that no checkpoint has seen."""
    trainer = accumulated(folder)
    trainer.add_callback(_Kill(2))
    trainer.train()


def of_two_rows(folder: Any, rows: int, sets: int) -> Any:
    """Two updates of two rows in double precision, as one batch, as two sets of rows or of one in each process."""
    options = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": sets, "weight_decay": 0.01}
    options |= {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    return trainer_of(made("cached").double(), folder, **options)


def distributed(folder: Any) -> None:
    """One of two processes: train, count the reductions of its updates, and train again from a checkpoint."""
    trainer = of_two_rows(folder, 1, 1)
    reduced, plain = [], torch.distributed.all_reduce

    def counted(tensor: Tensor, *given: Any, **named: Any) -> Any:
        reduced.append(tensor.numel())
        return plain(tensor, *given, **named)

    torch.distributed.all_reduce = counted
    trainer.train()
    torch.distributed.all_reduce = plain
    parameters = sum(p.numel() for p in trainer.model.parameters()) + len(list(trainer.model.parameters()))
    assert [n for n in reduced if n >= parameters] == [parameters] * 2, reduced
    resumed = of_two_rows(folder, 1, 1)
    if os.environ["RANK"] == "1":  # as if it had been killed before it wrote its part of the newest checkpoint
        (folder / "checkpoint-2" / "rows-1.safetensors").unlink()
    resumed.train(resume_from_checkpoint=True)
    assert str(resumed._resumed) == str(folder / "checkpoint-1")
    assert all(map(torch.equal, resumed.model.parameters(), trainer.model.parameters()))
    if os.environ["RANK"] == "0":
        torch.save([p.detach() for p in trainer.model.parameters()], folder / "weights.pt")
