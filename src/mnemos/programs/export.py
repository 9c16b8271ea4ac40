"""`mnemos.export`: the graphs of a model's step and prefill in a folder, with what a reader needs to run them.

`torch.export` traces a copy of the model in which the parts have the forms of `forms`, from examples that show which
sizes of the state stay open; `torch.onnx` translates what it traced.
"""

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from mnemos import libraries
from mnemos._compat import pytree
from mnemos.atomic import check_output_folder, whole_or_none, write_json
from mnemos.attention.multi_head import padded_state
from mnemos.config import to_dict
from mnemos.errors import InputError, near_arguments
from mnemos.generate.stream import new_state
from mnemos.models.encoder_decoder import EncoderDecoder
from mnemos.modes import evaluating, plain_module
from mnemos.types import Recurrent, State, leaves, likelihood_of

from .forms import Form, adapt, unflatten

Target = Literal["onnx", "onnxruntime", "torch"]
TARGETS: tuple[str, ...] = get_args(Target)
ABOUT = "program.json"
OPSET = 20  # that of torch.onnx by default: runtimes of 2024 have it
ROWS, TOKENS, SEEN, SOURCE = "rows", "tokens", "seen", "source"  # the sizes that a graph leaves open
Shape = tuple[int | str, ...]


@near_arguments
def export(model: nn.Module, folder: str | Path, to: Target = "onnx") -> Path:
    """Write a causal model with a state as programs that run without this library; returns the folder.

        folder = mnemos.export(model, "program")             # step.onnx, prefill.onnx, state.npz, program.json

    step: `outputs, state = step(tokens, state)` for tokens [rows, 1]; prefill: for [rows, T], any T of at least 1.
    state.npz: the state of a new row. program.json: names, types and shapes of all inputs and outputs. An
    encoder-decoder has a program encode too: the state of new rows from `source` and `valid` [rows, S].

    to: "onnx": ONNX's operators alone, for any runtime; "onnxruntime": with ONNX Runtime's own kernels, of linear
    attention (releases from 1.25.1 on), the delta rule and decayed attention (tested with 1.32); "torch":
    programs that `torch.export.load` reads. Cost: seconds to a minute; the weights are in each program.
    Raises InputError, and writes nothing, for a folder that is not empty, a model without a causal state, one whose
    weights are not float32 (or float64 with "torch": ONNX Runtime lacks kernels for it), one that is not exportable (it
    names the part), and where onnx or onnxscript is missing.
    """
    if to not in TARGETS:
        raise InputError(f"export: expected to={' or '.join(map(repr, TARGETS))}, found {to!r}")
    folder = Path(folder)
    check_new(folder)
    if not isinstance(model, nn.Module):
        raise InputError(f"export: expected a model, an nn.Module, found {type(model).__name__}; give the model itself")
    known = {torch.float32, torch.float64} if to == "torch" else {torch.float32}
    model = plain_module(model, "export")
    others = {x.dtype for x in model.parameters()} - known
    if others:
        expected, found = (" or ".join(sorted(map(str, some))) for some in (known, others))
        raise InputError(
            f"export: expected weights of {expected} for to={to!r}, found {found}; call model.float() first"
        )
    programs = export_programs(model, "onnxruntime" if to == "onnxruntime" else "operators")

    # --- the graphs, and the state of a new row ---
    states = list(programs.state)
    names = [name for name in ("step", "prefill", "encode") if getattr(programs, name) is not None]
    ending = "pt2" if to == "torch" else "onnx"
    with whole_or_none(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            program, file = getattr(programs, name), folder / f"{name}.{ending}"
            if to == "torch":
                torch.export.save(program, file)
            elif name == "encode":
                onnx_graph(program, ["source", "valid"], states).save(file)
            else:
                onnx_graph(program, ["tokens", *states], ["outputs", *map(after, states)]).save(file)
        arrays: dict[str, Any] = {name: x.numpy() for name, x in programs.state.items()}
        np.savez_compressed(folder / "state.npz", **arrays)

        # --- what they read and return, in their order ---
        def entry(name: str, dtype: torch.dtype, shape: Shape) -> dict[str, Any]:
            return {"name": name, "type": str(dtype).removeprefix("torch."), "shape": list(shape)}

        outputs, _ = programs.step.module()(torch.zeros(1, 1, dtype=torch.int64), programs.state)
        state = [entry(name, x.dtype, programs.shapes[name]) for name, x in programs.state.items()]
        likelihood = likelihood_of(model)
        meaning = "logits" if likelihood is None else f"parameters of a {type(likelihood).__name__}"
        about = {
            "programs": {name: f"{name}.{ending}" for name in names},
            "outputs are": "log-probabilities" if hasattr(likelihood, "log_prob") else meaning,
            "inputs": [entry("tokens", torch.int64, (ROWS, TOKENS)), *state],
            "outputs": [
                entry("outputs", outputs.dtype, (ROWS, TOKENS, *outputs.shape[2:])),
                *({**one, "name": after(one["name"])} for one in state),
            ],
        }
        if programs.encode is not None:
            size = ROWS, SOURCE
            about["inputs of encode"] = [entry("source", torch.int64, size), entry("valid", torch.bool, size)]
        about["model"] = to_dict(model.config) if hasattr(model, "config") else type(model).__name__
        write_json(folder / ABOUT, about)
    return folder


def check_new(folder: Path) -> None:
    """Raise InputError unless a folder is new or empty."""
    check_output_folder(folder)
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: expected a new or empty folder, found files in it; name another")


def after(name: str) -> str:
    """The name of a state's tensor among the outputs of a graph."""
    return f"after.{name}"


class Programs(NamedTuple):
    """A model's exported graphs, and what they read and return.

    step, prefill: `outputs, state = program.module()(tokens, state)`; tokens [rows, 1] or [rows, T] int64, state a dict
    of tensors. shapes: the shape of each, with the names of open sizes; "seen" is 0 in a new row and grows with every
    token. A new row is all zeros. encode (of an encoder-decoder, else None): `state = program.module()(source, valid)`.
    """

    step: torch.export.ExportedProgram
    prefill: torch.export.ExportedProgram
    encode: torch.export.ExportedProgram | None
    shapes: dict[str, Shape]
    state: dict[str, Tensor]


class _Step(nn.Module):
    """`outputs, state = step(tokens, state)`, with the state as a dict of tensors.

    Outputs are the model's, or log-probabilities where its likelihood has them (an adaptive softmax).
    """

    def __init__(self, model: nn.Module, state: State) -> None:
        super().__init__()
        self.model, self.structure = model, pytree.tree_flatten(state)
        likelihood = likelihood_of(model)
        self.likelihood = likelihood if hasattr(likelihood, "log_prob") else None

    def forward(self, tokens: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        outputs, new = self.model(tokens, unflatten(list(state.values()), self.structure))
        if self.likelihood is not None:
            outputs = self.likelihood.log_prob(outputs)
        return outputs, dict(zip(state, leaves(new), strict=True))


class _Encode(nn.Module):
    """`state = encode(source, valid)`: the state of new rows that read these sources, as a dict of tensors."""

    def __init__(self, model: EncoderDecoder, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, source: Tensor, valid: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, leaves(padded_state(self.model, self.model.encode(source, valid))), strict=True))


_ROWS = 3  # of the examples: a number that is no size of a model's parts by chance, and not 0 or 1


def export_programs(model: nn.Module, form: Form = "operators") -> Programs:
    """The graphs of a causal model with a state, for any number of rows and tokens, without dropout or gradient.

    form: "operators": PyTorch's own; "onnxruntime": with ONNX Runtime's kernels of linear attention and its kin. The
    state is the model's, with what has a bound, such as the keys of a window, as long as it becomes
    (`pad_to_capacity`): only a part without a bound changes its size. The prefill is a loop over tokens, as slow as
    single steps, for models that read in segments, gated caches, LSTMs and, with "operators", layers that forget or
    correct. Cost: seconds.
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

    def example(tokens: int, source: int = 5) -> State:
        """The state of some rows after so many tokens, and after a source, if there are sources."""
        x = torch.zeros(_ROWS, tokens, dtype=torch.int64)
        state = new_state(model, _ROWS, "export")
        if isinstance(model, EncoderDecoder):
            state = model.encode(torch.zeros(_ROWS, source, dtype=torch.int64))
        return padded_state(model, model(x, state)[1] if tokens else state)

    def shape(read: Tensor, longer: Tensor, wider: Tensor) -> Shape:
        """Sizes, with names for those that differ between examples."""
        sizes: list[int | str] = list(read.shape)
        for i, n in enumerate(read.shape):
            sizes[i] = ROWS if i == 0 else SEEN if longer.shape[i] != n else SOURCE if wider.shape[i] != n else n
        return tuple(sizes)

    with evaluating(model), torch.no_grad():
        # --- the state's tensors: state.00, state.01, … of one length, as torch.export replaces them as text ---
        new, read = padded_state(model, new_state(model, 1, "export")), example(2)
        if (before := _layout(new)) != (then := _layout(read)):
            raise InputError(
                "export: expected a state whose tensors alone change with the tokens, found the parts "
                f"{', '.join(before[0]):.200} in a new row and {', '.join(then[0]):.200} after two tokens; make each a "
                "tensor [rows, ..] from the start, also a count"
            )
        parts = list(zip(*map(leaves, (read, example(3), example(2, 6))), strict=True))
        names = [f"state.{i:0{len(str(max(len(parts) - 1, 0)))}}" for i in range(len(parts))]
        shapes = {name: shape(*examples) for name, examples in zip(names, parts, strict=True)}
        dims = {size: torch.export.Dim(size, min=int(size != SEEN)) for size in (ROWS, TOKENS, SEEN, SOURCE)}
        sizes = {name: {i: dims[n] for i, n in enumerate(s) if isinstance(n, str)} for name, s in shapes.items()}

        # --- the graphs ---
        adapted = adapt(model, form)
        both, state = _Step(adapted, example(0)), dict(zip(names, map(_dense, leaves(read)), strict=True))
        rows, tokens = {0: dims[ROWS]}, torch.zeros(_ROWS, 4, dtype=torch.int64)
        step = _trace(both, adapted, (tokens[:, :1].clone(), state), (rows, sizes))
        prefill = _trace(both, adapted, (tokens, state), (rows | {1: dims[TOKENS]}, sizes))
        encode = None
        if isinstance(adapted, EncoderDecoder):
            source = rows | {1: dims[SOURCE]}
            valid = torch.ones_like(tokens, dtype=torch.bool)
            encode = _trace(_Encode(adapted, names), adapted, (tokens, valid), (source, source))
    return Programs(step, prefill, encode, shapes, dict(zip(names, map(_dense, leaves(new)), strict=True)))


def _layout(state: State) -> tuple[list[str], object]:
    """The parts of a state and their structure. A graph would hold what is no tensor as it is in a new row."""
    parts, structure = pytree.tree_flatten(state)
    return ["a tensor" if isinstance(x, Tensor) else f"{x!r}" for x in parts], structure


def _dense(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


# What code does that leaves no size open, by the name of the size.
_FIXES = {
    TOKENS: "its code fixes the number of tokens, as a loop over them does",
    ROWS: "its code fixes the number of rows, as len() does; x.shape[0] does not",
    SEEN: "its state grows to a bound; `pad_to_capacity` must give it this length from the start",
    SOURCE: "its code fixes the number of source tokens",
}


def _trace(module: nn.Module, model: nn.Module, inputs: tuple[Any, ...], sizes: Any) -> torch.export.ExportedProgram:
    names = {id(part): name for name, part in model.named_modules()}
    try:
        program = _traced(module, inputs, sizes)
    except Exception as error:  # of any class: the exporter passes on what the model's own code raises
        # --- the innermost module of the model whose code raised it; the model, if it was in none ---
        part, frame = model, error.__traceback__
        while frame is not None:
            owner = frame.tb_frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in names:
                part = owner
            frame = frame.tb_next
        reason = " ".join(str(error).split())
        if fixed := re.match(r"Constraints violated \(([\w, ]+)\)", reason):  # found after the model's code has run
            part = _fixing(module, model, inputs, sizes)
            reason = "; ".join(_FIXES[name] for name in fixed[1].split(", ") if name in _FIXES) or reason
        name, cls = names[id(part)], type(part).__name__
        raise InputError(
            f"export: expected a model whose operations need no sizes or values, found "
            f"{f'{name} ({cls})' if name else cls} ({reason:.900}); use another part, or this library to run the model"
        ) from error
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    if own := next((node for graph in graphs for node in graph.nodes if str(node.target).startswith("mnemos.")), None):
        raise InputError(
            f"export: expected operations of PyTorch in the graph, found {_place(own)}, which has no form; give "
            "its layer one in FORMS of mnemos/programs/forms.py"
        )
    return program


def _traced(module: nn.Module, inputs: tuple[Any, ...], sizes: Any) -> torch.export.ExportedProgram:
    torch.compiler.reset()  # guards of an earlier graph's loop would fix sizes that this one leaves open
    with quiet():  # the exporter prints the graph of a model that fails
        return torch.export.export(module, inputs, dynamic_shapes=sizes, strict=False)


def _fixing(module: nn.Module, model: nn.Module, inputs: tuple[Any, ...], sizes: Any) -> nn.Module:
    """The part whose code makes a number of a size that is to stay open, by another trace; the model, if none does."""
    known: list[int | torch.SymInt] = []
    running, found = [model], list[nn.Module]()

    def note(part: nn.Module) -> None:
        if not found and any(is_concrete_int(n) for n in known):
            found.append(part)

    def begin(part: nn.Module, given: tuple[Any, ...]) -> None:
        if part is module:
            known.extend(n for x in leaves(given) for n in x.shape if not isinstance(n, int))
        note(running[-1])
        running.append(part)

    def end(part: nn.Module, *given: Any) -> None:
        note(running.pop())

    parts = [module, *model.modules()]
    hooks = [
        hook for part in parts for hook in (part.register_forward_pre_hook(begin), part.register_forward_hook(end))
    ]
    try:
        _traced(module, inputs, sizes)
    except Exception:  # that of the first trace
        return found[0] if found and found[0] is not module else model
    finally:
        for hook in hooks:
            hook.remove()
    return model


def _place(node: torch.fx.Node) -> str:
    """The operation of a graph's node, and the layer that calls it, where the graph says so."""
    layers = [path.removeprefix("model.") for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return f"{node.target} in {layers[-1]}" if layers and layers[-1] else str(node.target)


def onnx_graph(program: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """The graph as a `torch.onnx.ONNXProgram` with these names of its inputs and outputs.

    Raises InputError where the library onnx or onnxscript is missing, and for an operation that ONNX does not have.
    """
    libraries.onnx()
    script: Any = libraries.onnxscript()
    op, types = script.opset20, script.ir.DataType

    # --- what ONNX Runtime has no kernel for, or PyTorch no translation ---
    def where(condition: Any, self: Any, other: Any) -> Any:
        """ONNX Runtime chooses between numbers, not between truth values."""
        if self.dtype != types.BOOL:
            return op.Where(condition, self, other)
        return op.Or(op.And(condition, self), op.And(op.Not(condition), other))

    def sort(self: Any, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
        """`TopK` of all entries: equal ones stay in order. It takes no truth values and no bytes."""
        count = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
        numbers = self if self.dtype in (types.FLOAT, types.DOUBLE) else op.Cast(self, to=types.INT64)
        values, indices = op.TopK(numbers, count, axis=dim, largest=int(descending), sorted=1)
        return op.CastLike(values, self), indices

    # Without gradient: else PyTorch takes the attention apart into views that strides do not allow.
    try:
        with torch.no_grad(), quiet():
            return torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=list(inputs),
                output_names=list(outputs),
                custom_translation_table={torch.ops.aten.where.self: where, torch.ops.aten.sort.stable: sort},
            )
    except Exception as error:  # of private classes: the first one of a chain says the reason
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        frame, found = reason.__traceback__, "others"
        while frame is not None:
            node = frame.tb_frame.f_locals.get("node")
            found = _place(node) if isinstance(node, torch.fx.Node) else found
            frame = frame.tb_next
        raise InputError(
            f"export: expected operations that ONNX has, found {found} ({' '.join(str(reason).split()):.300}); use "
            "another layer, or to='torch'"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, what PyTorch's exporters write to `sys.stdout` and `sys.stderr` is dropped, for all threads.

    Warnings are ignored, also where a filter makes errors of them.
    """
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
