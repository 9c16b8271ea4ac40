"""Exported steps in ONNX Runtime beside PyTorch: 10,000 streamed steps of every kind of state, and the time of a step.

    python benchmarks/onnx_step.py parity [--kinds linear rmt ...] [--steps 10000] [--out FILE]
    python benchmarks/onnx_step.py parity --runs FOLDER ... --text FILE [--steps 10000] [--out FILE]
    python benchmarks/onnx_step.py speed [--rounds 40] [--clock cpu] [--out FILE]

Parity: a small model of each kind reads the same tokens, ONNX Runtime step by step from its own states, PyTorch as a
whole (token by token where the cuts are part of the computation), in float32 and, if it may be read as a whole, in
float64. The table has the largest differences of logits over all steps and in each tenth of them, at how many tokens
the most probable one differs, and the mean −log p of the tokens in nats. With --runs: the models of these runs of
bytes, and beside each a new one of the same configuration, on the first bytes of a file.

Time: one row, one thread, of models of linear attention as in benchmarks/decoding.py and of a window of softmax. A
round times the fused step, ONNX Runtime with new arrays at each step and "bound" to arrays that are made once, and the
plain model in turn; each does two steps before those that are timed. ratio: the median over rounds of the ratio of two
times of one round. clock "cpu": the CPU time of this thread, which other
programs disturb less; "wall": with a quiet machine.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from command import command, summary, write
from torch import Tensor, nn
from torch.nn import functional as F

import mnemos
from mnemos import GRC, CompressiveConfig, LinearConfig, RelativeConfig, SoftmaxConfig, registry
from mnemos.programs.export import after, export_programs, onnx_graph

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
VOCABULARY, SEGMENT = 64, 32
SIZES = {"vocab_size": VOCABULARY, "dim": 64, "layers": 2, "num_heads": 4, "mlp": 128, "segment": SEGMENT}
SIZES |= {"encoder_layers": 1, "decoder_layers": 1}


def small(name: str, **fields: Any) -> nn.Module:
    """A registered model with the sizes that it has."""
    torch.manual_seed(0)
    config = registry.load("model", name)
    known = {f.name for f in dataclasses.fields(config)}
    return config(**{k: v for k, v in SIZES.items() if k in known}, **fields).build().eval()


def transformer(attention: Any, **fields: Any) -> nn.Module:
    return small("transformer", attention=attention, **fields)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: transformer(LinearConfig()),
    "softmax, window 64": lambda: transformer(SoftmaxConfig(window=64), position="rotary"),
    "softmax, growing": lambda: transformer(SoftmaxConfig(), position="rotary"),
    "relative, same length": lambda: transformer(RelativeConfig(memory=64, same_length=True), position="none"),
    "compressive": lambda: transformer(CompressiveConfig(memory=32, compressed=16), position="none"),
    "gated cache of a stream": lambda: transformer(LinearConfig(), cache=GRC(length=16, scope="stream")),
    "lstm": lambda: small("lstm"),
    "rmt": lambda: small("rmt"),
    "armt": lambda: small("armt"),
    "memory-transformer": lambda: small("memory-transformer"),
    "memformer": lambda: small("memformer"),
}


def session(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """ONNX Runtime's session of a model's step, with one thread, and the state of a new row."""
    programs = export_programs(model)
    names = list(programs.state)
    graph = onnx_graph(programs.step, ["tokens", *names], ["outputs", *map(after, names)])
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1, 3
    found = onnxruntime.InferenceSession(graph.model_proto.SerializeToString(), settings)
    return found, {name: x.numpy() for name, x in programs.state.items()}


def streamed(model: nn.Module, tokens: Tensor) -> Tensor:
    """ONNX Runtime's outputs [T, V] for tokens [1, T], one step each."""
    step, state = session(model)
    given, outputs = tokens.numpy(), []
    for i in range(tokens.shape[1]):
        y, *states = step.run(None, {"tokens": given[:, i : i + 1], **state})
        state = dict(zip(state, states, strict=True))
        outputs.append(torch.from_numpy(y[0, 0]))
    return torch.stack(outputs)


@torch.no_grad()
def parity(name: str, model: nn.Module, tokens: Tensor) -> dict[str, Any]:
    """The differences over tokens [1, T]. The model is of float64 afterwards."""
    steps = tokens.shape[1]
    found = streamed(model, tokens)
    row: dict[str, Any] = {"name": name, "steps": steps}
    parts: dict[str, list[float]] = {}
    if model.splits == "anywhere":
        ours = model(tokens)[0][0]
        exact = model.double()(tokens)[0][0]
        row["largest difference from float64"] = {
            "onnxruntime": float((found - exact).abs().max()),
            "torch": float((ours - exact).abs().max()),
        }
        parts["torch from float64"] = tenths(ours - exact)
    else:
        state, outputs = model.initial_state(1), []
        for i in range(steps):
            y, state = model(tokens[:, i : i + 1], state)
            outputs.append(y[0, 0])
        ours = torch.stack(outputs)
    row["largest difference from torch"] = float((found - ours).abs().max())
    row["largest differences in tenths"] = {"onnxruntime from torch": tenths(found - ours), **parts}
    row["standard deviation of logits"] = float(ours.std())
    row["other most probable tokens"] = int((found.argmax(-1) != ours.argmax(-1)).sum())
    row["nats"] = float(F.cross_entropy(found[:-1], tokens[0, 1:]))
    return row


def tenths(difference: Tensor) -> list[float]:
    """The largest size of a difference [T, V] in each tenth of the tokens."""
    return [float(part.abs().max()) for part in difference.tensor_split(10)]


def of_kinds(names: list[str], steps: int) -> Iterator[dict[str, Any]]:
    """A row for each kind: its model with random weights, on random tokens."""
    for name in names:
        model = KINDS[name]()
        yield parity(name, model, torch.randint(VOCABULARY, (1, steps), generator=torch.Generator().manual_seed(1)))


def of_runs(folders: list[str], text: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Two rows for each run of bytes: its model, and a new one of the same configuration."""
    tokens = torch.tensor([list(text.read_bytes()[:steps])])
    for folder in folders:
        model = mnemos.load(folder)
        torch.manual_seed(0)
        untrained = model.config.build()
        yield parity(f"{model.config.name}, trained", model.eval(), tokens)
        yield parity(f"{model.config.name}, untrained", untrained.eval(), tokens)


def bound(step: Any, tokens: Any, outputs: Any, before: dict[str, Any], written: dict[str, Any]) -> Any:
    """ONNX Runtime's binding of a step: it reads `tokens` and the state `before`, and writes the other two."""
    binding = step.io_binding()
    for name, x in {"tokens": tokens, **before}.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(x))
    for name, x in {"outputs": outputs, **{after(name): x for name, x in written.items()}}.items():
        binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(x))
    return binding


SHAPES = ((128, 4), (256, 8), (512, 8))


@torch.no_grad()
def speed(dim: int, layers: int, attention: Any, rounds: int, clock: str, calls: int = 30) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "dim": dim, "layers": layers, "num_heads": 8, "mlp": 4 * dim}
    model = mnemos.TransformerConfig.classic(attention=attention, **sizes).build().eval()
    fused, tokens = mnemos.fused_step(model), torch.zeros(1, 1, dtype=torch.int64)
    assert fused.fused, fused.why
    step, new = session(model)
    warm = torch.zeros(1, 64, dtype=torch.int64)  # so that a window is full
    started = model(warm)[1]
    states = [x.numpy() for x in mnemos.types.leaves(model.pad_to_capacity(started))]
    begun = dict(zip(new, states, strict=True))
    one, other = ({name: x.copy() for name, x in begun.items()} for _ in range(2))
    given, outputs = tokens.numpy(), np.zeros((1, 1, sizes["vocab_size"]), np.float32)
    turns = [bound(step, given, outputs, one, other), bound(step, given, outputs, other, one)]
    step.run_with_iobinding(turns[0])
    torch.testing.assert_close(torch.from_numpy(outputs), fused(tokens, started)[0], rtol=1e-4, atol=2e-5)

    def torch_step(one: Callable[..., Any], calls: int) -> None:
        state = started
        for _ in range(calls):
            _, state = one(tokens, state)

    def onnx_bound(calls: int) -> None:
        for i in range(calls):
            step.run_with_iobinding(turns[i % 2])

    def onnx_step(calls: int) -> None:
        state = begun
        for _ in range(calls):
            _, *found = step.run(None, {"tokens": given, **state})
            state = dict(zip(state, found, strict=True))

    runs: dict[str, Callable[[int], None]] = {
        "fused": lambda calls: torch_step(fused, calls),
        "onnxruntime": onnx_step,
        "bound": onnx_bound,
        "plain": lambda calls: torch_step(model, calls),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    now = CLOCKS[clock]
    for i in range(rounds + 1):
        for name, run in runs.items():
            run(2)  # the one before read other weights, or the same: without this, the order would count
            start = now()
            run(calls)
            if i:  # the first round warms up
                times[name].append((now() - start) / calls)
    row: dict[str, Any] = {"name": f"{attention.name}-{dim}x{layers}", "dim": dim, "layers": layers}
    found = summary(times, "fused", "of the fused step")
    row |= found | {"least ms": {name: 1e3 * min(each) for name, each in times.items()}}
    return row


def main() -> None:
    parser = command(
        __doc__, choices={"kinds": KINDS, "clock": CLOCKS}, kinds=list(KINDS), steps=10_000, rounds=40, clock="cpu"
    )
    parser.add_argument("table", choices=("parity", "speed"))
    parser.add_argument("--runs", nargs="*", default=[], help="in place of the kinds: folders of runs of bytes")
    parser.add_argument("--text", type=Path, help="with --runs: the file that their models read")
    options = parser.parse_args()
    if options.runs and options.text is None:
        parser.error("--runs: expected --text FILE beside it")
    if options.runs and options.table == "speed":
        parser.error("--runs: expected parity, found speed; leave it out")
    torch.set_num_threads(1)
    found: dict[str, Any] = {"onnxruntime": onnxruntime.__version__, "threads": 1, "rows": []}
    if options.table == "speed":
        found["clock"] = options.clock
        shapes = [(*shape, one) for shape in SHAPES for one in (LinearConfig(), SoftmaxConfig(window=64))]
        rows = (speed(*shape, options.rounds, options.clock) for shape in shapes)
    elif options.runs:
        rows = of_runs(options.runs, options.text, options.steps)
    else:
        rows = of_kinds(options.kinds, options.steps)
    for row in rows:
        print(json.dumps(row), flush=True)
        found["rows"].append(row)
        write(options.out, found)


if __name__ == "__main__":
    main()
