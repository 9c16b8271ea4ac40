"""The two stages of a linearised decoder as tasks of `lab/run`; teacher and student are the same weights."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mnemos import tree_file
from mnemos.atomic import parse, read_text, write_json
from mnemos.hosts.linearise import is_linearised
from mnemos.hosts.linearised import add_updates, drop_updates
from mnemos.lab.tasks.batch import IGNORE, Batch
from mnemos.lab.tasks.metrics import LOSS
from mnemos.lab.tasks.task import HeldOut, Split, Task
from mnemos.ops.precision import full_precision
from mnemos.types import InputError, JSONObject, State

from .text_batches import Pieces


@contextlib.contextmanager
def original(model: nn.Module) -> Iterator[None]:
    """Inside, every linearised attention computes what it computed before `mnemos.linearise`, bit for bit.

    Its class is its own again, without low-rank updates. Caches of inside and outside are not each other's.
    """
    attentions = [(module, type(module)) for module in model.modules() if is_linearised(module)]
    try:
        for module, cls in attentions:
            module.__class__ = cls.__mro__[1]
            drop_updates(module)
        yield
    finally:
        for module, cls in attentions:
            module.__class__ = cls
            add_updates(module)


class Parameters(nn.ParameterDict):
    """What a stage trains, by name: the "model" of its run. lr_scales: rates in units of `OptimConfig.lr`."""

    def __init__(self, parameters: dict[str, nn.Parameter], rates: dict[str, float], rate: float) -> None:
        super().__init__({_key(name): value for name, value in parameters.items()})
        self.lr_scales = {_key(name): rates[name] / rate for name in parameters}


def _key(name: str) -> str:
    return name.replace(".", "/")  # a module's parameters have no dots in their own names


class _Stage(Task):
    """Update u reads part u mod n of group u div n, where n parts of `length` tokens are a piece."""

    metrics = (LOSS,)
    has_test = False

    def __init__(self, pieces: Pieces, length: int) -> None:
        self.pieces, self.max_length = pieces, length
        self.parts = pieces.ids.shape[1] // length

    def train_batch(self, index: int, batch_size: int, seed: int) -> Any:
        return self.part(self.pieces.group(index // self.parts, batch_size), index % self.parts)

    def batches(self, split: HeldOut, batch_size: int) -> Iterator[Any]:
        return (self.part([self.pieces.held_out], i) for i in range(self.parts))

    def part(self, numbers: Sequence[int], part: int) -> Any:
        raise NotImplementedError

    def tokens(self, batch: Any) -> int:
        return batch.inputs.numel()

    def size(self, split: Split) -> int:
        return 0 if split == "train" else self.pieces.ids.shape[1]


class AttentionTransfer(_Stage):
    """The linearised attentions of a decoder imitate their originals. changed: these attentions by name.

    The frozen decoder reads a row once, as it was; each attention gives its inputs and its output, and the linearised
    one reads the same inputs. Feature maps, γ and β are trained on the mean of `transfer_loss`; no gradient passes
    between layers. Cost: a forward of the decoder, and of each attention alone a forward and a backward without its
    projections' weights. Memory: the inputs and outputs of all attentions, and the activations of one.
    """

    def __init__(self, pieces: Pieces, length: int, decoder: Any, changed: dict[str, nn.Module]) -> None:
        super().__init__(pieces, length)
        self.decoder, self.changed = decoder, changed

    def part(self, numbers: Sequence[int], part: int) -> Batch:
        return Batch(self.pieces.ids[numbers][:, part * self.max_length :][:, : self.max_length], None)

    def forward(self, model: nn.Module, batch: Batch, state: State) -> tuple[Tensor, None]:
        return transfer_loss(self.decoder, self.changed, batch.inputs), None

    def loss(self, model: nn.Module, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs

    def count(self, batch: Batch) -> int:
        return 1  # the loss is a mean already


def transfer_loss(decoder: Any, changed: dict[str, nn.Module], ids: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean over attentions of Σ‖y − y*‖²/Σ‖y*‖² on rows `ids` [B, T]. weights [B, T]: of the tokens; None: 1."""
    calls: dict[str, tuple[Any, Any, Tensor]] = {}

    def record(name: str, module: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        calls[name] = arguments, named, output[0]

    hooks = [module.register_forward_hook(partial(record, name), with_kwargs=True) for name, module in changed.items()]
    try:
        with torch.no_grad(), original(decoder):
            decoder.base_model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()

    total = torch.zeros((), device=ids.device)
    for name, module in changed.items():
        arguments, named, wanted = calls.pop(name)
        errors, sizes = (module(*arguments, **named)[0] - wanted).square(), wanted.square()
        if weights is not None:
            errors, sizes = errors * weights[..., None], sizes * weights[..., None]
        loss = errors.sum() / sizes.sum() / len(changed)
        if not loss.requires_grad:
            total = total + loss
            continue
        # The gradient is taken here, so that the activations of one attention are held at a time. What is returned has
        # the loss's value and, by terms that are 0, its gradient.
        trained = [value for value in module.parameters() if value.requires_grad]
        gradients = zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True)
        linear = sum(((x - x.detach()) * g).sum() for x, g in gradients if g is not None)
        total = total + loss.detach() + linear
    return total


class Targets(NamedTuple):
    """A batch of the next token: ids [B, T], labels [B, T], and rows that begin [B].

    predictions: of `Teacher.predictions`, which are the targets; None: the labels are.
    """

    inputs: Tensor
    labels: Tensor
    reset: Tensor
    predictions: tuple[Tensor, Tensor, Tensor] | None = None


class NextToken(_Stage):
    """The linearised decoder predicts the next token, by KL from the decoder as it was (`teacher`), or by the labels.

    A piece of `context` tokens is read in updates of `length` tokens; the state goes on between them without gradient,
    inside one with. An update needs the activations of `length` tokens. step: `mnemos.functional` of the decoder.
    """

    carries_state = True

    def __init__(
        self, pieces: Pieces, length: int, step: Callable[[Tensor, State], tuple[Tensor, State]], teacher: Any
    ) -> None:
        super().__init__(pieces, length)
        self.step, self.teacher = step, teacher

    def part(self, numbers: Sequence[int], part: int) -> Targets:
        ids, here = self.pieces.ids[numbers], slice(part * self.max_length, (part + 1) * self.max_length)
        labels = F.pad(ids[:, 1:], (0, 1), value=IGNORE)
        batch = Targets(ids[:, here], labels[:, here], torch.full((len(ids),), part == 0))
        if self.teacher is None:
            return batch
        tokens, probabilities, rest = (x[:, here] for x in self.teacher.predictions(numbers, ids))
        return batch._replace(predictions=(tokens, probabilities, rest))

    def forward(self, model: nn.Module, batch: Targets, state: State) -> tuple[Tensor, State]:
        return self.step(batch.inputs, state)

    def loss(self, model: nn.Module, outputs: Tensor, batch: Targets) -> Tensor:
        if batch.predictions is not None:
            return divergence(outputs, *batch.predictions).sum()
        return F.cross_entropy(outputs.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum")

    def count(self, batch: Targets) -> int:
        return batch.labels.numel() if self.teacher is not None else int((batch.labels != IGNORE).sum())

    def resets(self, batch: Targets) -> Tensor:
        return batch.reset


class Teacher:
    """The next-token distributions of the model before it was linearised: of each position, the `top` likeliest tokens.

    They are computed when a piece is first asked for, and kept in `folder`, so that runs of other seeds and other
    states find them. A file has 6·K + 4 bytes a token. Raises InputError if the folder has those of other text, of
    another model or of another `top`.
    """

    def __init__(self, model: nn.Module, folder: Path, top: int, about: JSONObject) -> None:
        self.model, self.folder, self.top = model, folder, top
        self._last: tuple[list[int], tuple[Tensor, Tensor, Tensor]] | None = None  # successive updates read one group
        about = about | {"top": top}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "teacher.json"
        if path.is_file() and parse(read_text(path)) != about:
            raise InputError(f"{folder}: expected the teacher of this model and text, found another; name a new folder")
        write_json(path, about)

    def path(self, number: int) -> Path:
        return self.folder / f"piece-{number:06d}.safetensors"

    def predictions(self, numbers: Sequence[int], ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """After each token of the pieces `ids` [B, T] with these numbers: (tokens, probabilities, rest).

        tokens and probabilities [B, T, K] of the likeliest; rest [B, T] = 1 − Σ of these probabilities.
        """
        if self._last is None or self._last[0] != [*numbers]:
            with full_precision(ids.device.type):  # a training in bfloat16 learns from, and keeps, the same numbers
                pieces = [self._piece(number, row) for number, row in zip(numbers, ids, strict=True)]
                tokens, logs, rest = (torch.stack([one[name] for one in pieces]) for name in ("tokens", "logs", "rest"))
                likely = logs.float().exp()
                # The logarithms are kept in half precision: what they give is scaled to add up to 1 with the rest.
                self._last = [*numbers], (tokens.long(), likely * ((1 - rest) / likely.sum(-1))[..., None], rest)
        return self._last[1]

    def _piece(self, number: int, ids: Tensor) -> dict[str, Tensor]:
        path = self.path(number)
        if not path.is_file():
            with torch.no_grad(), original(self.model):
                logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
            likely, tokens = logits.topk(self.top)
            logs = likely - logits.logsumexp(-1, keepdim=True)
            rest = (1 - logs.double().exp().sum(-1)).clamp(min=1e-6).float()
            tree_file.write(path, {"tokens": tokens.int(), "logs": logs.half(), "rest": rest})
        piece: dict[str, Tensor] = tree_file.read(path)
        return piece


class _Divergence(torch.autograd.Function):
    """See `divergence`. The gradient is computed with the value, in place of the logits' exponentials: one buffer."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, probabilities: Tensor, rest: Tensor) -> Tensor:
        p = logits.detach().float().log_softmax(-1)
        logs = p.gather(-1, tokens)
        own = logs.exp()
        left = (1 - own.double().sum(-1)).clamp(min=1e-9).float()
        terms = probabilities * (probabilities.clamp(min=1e-9).log() - logs)
        value = terms.sum(-1) + rest * (rest.log() - left.log())
        # The gradient of a kept token's logit is q − p, that of another one q·(1 − rest/left).
        p.exp_().mul_((1 - rest / left)[..., None])
        p.scatter_(-1, tokens, own - probabilities)
        ctx.save_for_backward(p)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (p,) = ctx.saved_tensors
        return p * gradients[0][..., None], None, None, None


def divergence(logits: Tensor, tokens: Tensor, probabilities: Tensor, rest: Tensor) -> Tensor:
    """KL(teacher ‖ student) in nats at each position, [..., V] -> [...], with all other tokens as one.

        Σ_k p_k·log(p_k/q_k) + r·log(r/(1 − Σ_k q_k))

    tokens, probabilities [..., K], rest [...]: of `Teacher.predictions`. q: softmax of the logits. It is at most the
    whole divergence, and equals it if the tokens are all of the vocabulary. Only the logits get a gradient.
    """
    value: Tensor = _Divergence.apply(logits, tokens, probabilities, rest)
    return value
