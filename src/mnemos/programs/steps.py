"""`torch.export` of a streaming model: programs of one step and of any number of tokens, from state to state."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mnemos._compat import forget_control_flow, pytree
from mnemos.attention.multi_head import widened
from mnemos.errors import InputError
from mnemos.generate.stream import new_state
from mnemos.models.encoder_decoder import EncoderDecoder
from mnemos.modes import evaluating
from mnemos.types import Recurrent, State, leaves, likelihood_of

from .forms import Form, adapt
from .loops import unflatten
from .quiet import quiet

ROWS, TOKENS, SEEN, SOURCE = "rows", "tokens", "seen", "source"  # the sizes that a program leaves open
Shape = tuple[int | str, ...]


class Programs(NamedTuple):
    """A model's programs, and what they read and return.

    step, prefill: `outputs, state = program.module()(tokens, state)`; tokens [rows, 1] or [rows, T] int64, state a dict
    of tensors. shapes: the shape of each, with the names of open sizes; "seen" is 0 in a new row and grows with every
    token. A new row is all zeros. encode (of an encoder-decoder, else None): `state = program.module()(source, valid)`.
    """

    step: torch.export.ExportedProgram
    prefill: torch.export.ExportedProgram
    encode: torch.export.ExportedProgram | None
    shapes: dict[str, Shape]
    state: dict[str, Tensor]


class Program(nn.Module):
    """`outputs, state = program(tokens, state)`, with the state as a dict of tensors.

    Outputs are the model's, or log-probabilities where its likelihood has them (an adaptive softmax).
    """

    def __init__(self, model: nn.Module, state: State) -> None:
        super().__init__()
        self.model, self.structure = model, pytree.tree_flatten(state)
        found = likelihood_of(model)
        self.likelihood = found if hasattr(found, "log_prob") else None

    def forward(self, tokens: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """See the class."""
        outputs, after = self.model(tokens, unflatten(list(state.values()), self.structure))
        if self.likelihood is not None:
            outputs = self.likelihood.log_prob(outputs)
        return outputs, dict(zip(state, leaves(after), strict=True))


class _Encode(nn.Module):
    """`state = encode(source, valid)`: the state of new rows that read these sources, as a dict of tensors."""

    def __init__(self, model: EncoderDecoder, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, source: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """source [rows, S] int64, valid [rows, S] bool: True for tokens that are no padding."""
        return dict(zip(self.names, leaves(widened(self.model, self.model.encode(source, valid))), strict=True))


def export_programs(model: nn.Module, form: Form = "operators") -> Programs:
    """The programs of a causal model with a state, for any number of rows and tokens, without dropout or gradient.

    form: "operators": PyTorch's own; "onnxruntime": with ONNX Runtime's kernels of linear attention and its kin. The
    state is the model's, with what has a bound, such as the keys of a window, as long as it becomes (`widened`): only
    a part without a bound changes its size. The prefill is a loop over tokens, as slow as single steps, for models that
    read in segments, gated caches, LSTMs and, with "operators", layers that forget or correct.
    Cost: seconds.
    Raises InputError for a model without a causal state, and for one that is not exportable: it names the part.
    """
    if any(x.device.type != "cpu" for x in model.parameters()):
        raise InputError("export: expected a model on the CPU, found another device; call model.cpu() first")
    if not isinstance(model, Recurrent) and isinstance(inner := getattr(model, "model", None), Recurrent):
        raise InputError(
            f"export: expected a model of this library, found {type(model).__name__} around {type(inner).__name__}; "
            "give its .model"
        )
    if foreign := [type(x).__name__ for x in model.modules() if type(x).__module__.startswith("transformers.")]:
        raise InputError(
            f"export: expected a model of this library, found {foreign[0]} of Transformers, whose code for caches is "
            "not exportable; run it with this library, mnemos.functional(model) or its own generate"
        )
    with evaluating(model), torch.no_grad():
        new = widened(model, new_state(model, 1, "export"))
        start, read, *others = _examples(model)
        names = _names(read)
        same = zip(*map(leaves, (read, *others)), strict=True)
        shapes = {name: _shape(*examples) for name, examples in zip(names, same, strict=True)}
        dims = {size: torch.export.Dim(size, min=int(size != SEEN)) for size in (ROWS, TOKENS, SEEN, SOURCE)}
        sizes = {name: {i: dims[n] for i, n in enumerate(s) if isinstance(n, str)} for name, s in shapes.items()}
        model = adapt(model, form)
        program, given = Program(model, start), dict(zip(names, map(_dense, leaves(read)), strict=True))
        rows, tokens = {0: dims[ROWS]}, torch.zeros(_ROWS, 4, dtype=torch.int64)
        step = _export(program, model, (tokens[:, :1].clone(), given), (rows, sizes))
        prefill = _export(program, model, (tokens, given), (rows | {1: dims[TOKENS]}, sizes))
        encode = None
        if isinstance(model, EncoderDecoder):
            source = rows | {1: dims[SOURCE]}
            valid = torch.ones_like(tokens, dtype=torch.bool)
            encode = _export(_Encode(model, names), model, (tokens, valid), (source, source))
    return Programs(step, prefill, encode, shapes, dict(zip(names, map(_dense, leaves(new)), strict=True)))


_ROWS = 3  # of the examples: a number that is no size of a model's parts by chance, and not 0 or 1


def _examples(model: nn.Module) -> list[State]:
    """States of new rows, after 2 tokens, after 3, and after 2 of rows with a longer source, if there are sources."""

    def after(tokens: int, source: int = 5) -> State:
        x = torch.zeros(_ROWS, tokens, dtype=torch.int64)
        state = new_state(model, _ROWS, "export")
        if isinstance(model, EncoderDecoder):
            state = model.encode(torch.zeros(_ROWS, source, dtype=torch.int64))
        return widened(model, model(x, state)[1] if tokens else state)

    return [after(0), after(2), after(3), after(2, 6)]


def _names(state: State) -> list[str]:
    """state.00, state.01, …: names of one length, as torch.export replaces them as text."""
    count = len(leaves(state))
    return [f"state.{i:0{len(str(count - 1))}}" for i in range(max(count, 1))][:count]


def _shape(read: Tensor, longer: Tensor, wider: Tensor) -> Shape:
    """A tensor's sizes, with names for those that differ between examples."""

    def size(i: int) -> int | str:
        if i == 0:
            return ROWS
        n = read.shape[i]
        return SEEN if longer.shape[i] != n else SOURCE if wider.shape[i] != n else n

    return tuple(map(size, range(read.dim())))


def _dense(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _export(program: nn.Module, model: nn.Module, given: tuple[Any, ...], sizes: Any) -> torch.export.ExportedProgram:
    forget_control_flow()
    try:
        with quiet():  # the exporter prints the graph of a model that fails
            return torch.export.export(program, given, dynamic_shapes=sizes, strict=False)
    except Exception as error:  # of any class: the exporter passes on what the model's own code raises
        part, reason = _part(error, model), " ".join(str(error).split())
        raise InputError(
            f"export: expected a model whose operations need no sizes or values, found {part} ({reason:.900}); use "
            "another part, or this library to run the model"
        ) from error


def _part(error: BaseException, model: nn.Module) -> str:
    """The innermost module of the model whose code raised the error, by its name; the model, if it was in none."""
    names = {id(module): name for name, module in model.named_modules()}
    found, frame = model, error.__traceback__
    while frame is not None:
        one = frame.tb_frame.f_locals.get("self")
        if isinstance(one, nn.Module) and id(one) in names:
            found = one
        frame = frame.tb_next
    name = names[id(found)]
    return f"{name} ({type(found).__name__})" if name else type(found).__name__
