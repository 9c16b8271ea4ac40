"""Reading and writing streams of tokens at the cost that the model's state has: constant, for a memory of one size."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mnemos.config import to_dict
from mnemos.types import InputError, State, join, leaves, map_state, select

from .modes import evaluating
from .sampling import draw


class Stream:
    """A model's place in some streams: what it has read, as a state, and what it says comes next. Never changed.

        stream = Stream(model).read(prompt)               # prompt [B, T] int64
        tokens, stream = stream.write(100)                # tokens [B, 100]
        two = stream.select(torch.tensor([0, 0]))         # fork: the same stream twice
        all_of_them = Stream.join([two, other])           # batch
        stream.save("stream.safetensors"); stream = Stream.restore(model, "stream.safetensors")

    read and write give new streams, so an old one may be gone on from again. state: the model's; outputs [B, V]: what
    it says of the next token, None before anything is read. The model is used in eval mode and without gradient.
    Raises InputError for a model that keeps no state, or not from any place on.
    """

    __slots__ = ("model", "outputs", "state")

    def __init__(self, model: nn.Module, state: State = None, outputs: Tensor | None = None) -> None:
        self.model, self.state, self.outputs = model, state, outputs

    @property
    def rows(self) -> int:
        """B, the number of streams; 0 before anything is read."""
        return 0 if self.outputs is None else len(self.outputs)

    def read(self, tokens: Tensor, chunk: int = 1024) -> "Stream":
        """The stream after these tokens [B, T] too, taken in by `chunk` at a time: memory O(B·chunk).

        Cost: that of a forward of T tokens.
        """
        if chunk < 1:
            raise InputError(f"chunk must be at least 1, found {chunk}")
        if tokens.dim() != 2 or not tokens.numel():
            raise InputError(f"expected tokens [B, T], B and T at least 1, found shape {tuple(tokens.shape)}")
        state, outputs = self.state, self.outputs
        with torch.no_grad(), evaluating(self.model):
            for part in tokens.split(chunk, 1):
                whole, state = self.model(part, state)
                outputs = whole[:, -1]
        if state is None:
            raise InputError("a stream needs a causal model with a state; this one returns none")
        return Stream(self.model, state, outputs)

    def write(
        self,
        length: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, "Stream"]:
        """`length` tokens drawn one after the other, [B, length] int64, and the stream that has read them.

        temperature 0: always the likeliest. top_k > 0: among the k likeliest alone; top_p < 1: among the fewest that
        have that share. The same generator state gives the same tokens. Cost: a step of the model a token.
        """
        if self.outputs is None:
            raise InputError("a stream must read something before it can write; give it a prompt")
        if length < 0:
            raise InputError(f"length must be at least 0, found {length}")
        state, outputs = self.state, self.outputs
        tokens = torch.empty(length, len(outputs), dtype=torch.int64, device=outputs.device)
        likelihood = getattr(self.model, "likelihood", None)
        with torch.no_grad(), evaluating(self.model):
            for i in range(length):
                tokens[i] = draw(outputs, temperature, top_k, top_p, generator, likelihood)
                whole, state = self.model(tokens[i, :, None], state)
                outputs = whole[:, -1]
        return tokens.T, Stream(self.model, state, outputs)

    def select(self, rows: Tensor) -> "Stream":
        """The streams of the given rows: indices [R], of which repeats fork a stream, or a mask [B]."""
        if self.outputs is None:
            raise InputError("a stream that has read nothing has no rows to select")
        return Stream(self.model, *select((self.state, self.outputs), rows))

    @staticmethod
    def join(streams: Sequence["Stream"]) -> "Stream":
        """Streams of one model as one batch; they may have read different lengths."""
        if not streams or any(s.outputs is None or s.model is not streams[0].model for s in streams):
            raise InputError("join: expected streams of one model that have read something")
        return Stream(streams[0].model, *join([(s.state, s.outputs) for s in streams]))

    def save(self, file: str | Path) -> None:
        """Write the stream as safetensors, whole or not at all; `restore` goes on from there, bit for bit."""
        from safetensors.torch import save_file

        if self.outputs is None:
            raise InputError("a stream that has read nothing has nothing to save")
        file = Path(file)
        tensors = {f"state.{i}": x.contiguous() for i, x in enumerate(leaves(self.state))}
        # A copy each: tensors of a file may not share memory, and those of a state may.
        tensors = {name: x.clone() for name, x in {**tensors, "outputs": self.outputs}.items()}
        temporary = file.with_name(file.name + ".tmp")
        save_file(tensors, str(temporary), {"mnemos.stream": _signature(self.model)})
        temporary.replace(file)

    @classmethod
    def restore(cls, model: nn.Module, file: str | Path) -> "Stream":
        """The stream that `save` wrote. Raises InputError for a file that is missing, damaged or another model's."""
        from safetensors import SafetensorError, safe_open

        file = Path(file)
        if not file.is_file():
            raise InputError(f"{file}: expected a saved stream, found no such file")
        try:
            with safe_open(str(file), "pt") as opened:
                about = (opened.metadata() or {}).get("mnemos.stream")
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: expected a saved stream, cannot be read ({error})") from None
        if about is None or "outputs" not in tensors:
            raise InputError(f"{file}: expected a saved stream, found other tensors; Stream.save writes one")
        if about != _signature(model):
            raise InputError(f"{file}: is the stream of a model of another configuration; restore it with its own")
        outputs = tensors.pop("outputs")
        parameter = next(model.parameters())
        state = _like(model.initial_state(len(outputs)), list(tensors), file)  # type: ignore[operator]
        state = map_state(lambda name: tensors[name].to(parameter.device), state)
        return cls(model, state, outputs.to(parameter.device))

    def __repr__(self) -> str:
        return f"Stream({type(self.model).__name__}, {self.rows} rows)"


def _like(fresh: State, names: list[str], file: Path) -> State:
    """The structure of a fresh state with the names of the tensors in it that a file holds."""
    found, structure = pytree.tree_flatten(fresh)
    if sum(isinstance(x, Tensor) for x in found) != len(names):
        raise InputError(f"{file}: expected a state of {len(found)} tensors, found {len(names)}")
    count = iter(range(len(names)))
    return pytree.tree_unflatten([f"state.{next(count)}" if isinstance(x, Tensor) else x for x in found], structure)


def _signature(model: nn.Module) -> str:
    """What a stream's file says of its model: its configuration, or its class for a model that has none."""
    config: Any = getattr(model, "config", None)
    return json.dumps(to_dict(config)) if config is not None else type(model).__qualname__
