"""The delta rule, decayed attention and the short convolution on a CPU, beside the implementations that people have.

    python benchmarks/delta.py                                     # everything that is installed
    python benchmarks/delta.py --only gradients --widths 64 --tokens 1024 4096 --out results/delta.json

    part         what is timed                                              beside
    gradients    gated delta, forward and backward                          transformers, our linear attention
    channels     the same with a decay per channel (KDA)                    transformers
    decayed      Mamba-2's recurrence, forward and backward                 transformers
    forward      gated delta, a prefill without gradients                   zentorch; onnxruntime's GatedDeltaNet and
                                                                            LinearAttention
    step         gated delta, one token                                     the same, and transformers
    length       gated delta, forward and backward, up to 262,144 tokens    a product of two matrices alone
    convolution  a causal convolution of width 4 with silu                  PyTorch's conv1d and silu

First, every implementation must agree with the equations in float64, in values and, where it has them, gradients. A
round times each of them once, in an order that rotates; a ratio is the median over rounds of the ratio of two times of
one round. Batch 2, 8 heads, unless a row says otherwise. What is not installed is left out. With --out, the parts
that were run replace those in the file, each with its own provenance. "Kept" is the memory between the forward and the
backward pass in addition to inputs and outputs, in floats per token and channel of a head.
"""

import argparse
import gc
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from command import cells, command, kept, summary
from torch import Tensor
from torch.nn import functional as F

import mnemos
from mnemos.atomic import write_text
from mnemos.lab.measure.timing import race
from mnemos.lab.run.provenance import provenance
from mnemos.libraries import transformers
from mnemos.ops import decayed_attention, delta_rule, linear_attention, short_convolution
from mnemos.ops.convolution.reference import reference_short_convolution
from mnemos.ops.delta.reference import reference_delta_rule

BATCH, HEADS = 2, 8
CHECKED = 70  # tokens of the comparison with the equations
Call = Callable[..., tuple[Tensor, ...]]  # of the drawn tensors; y first
Runs = dict[str, Callable[[], object]]
ORT = "com.microsoft."


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def draw(tokens: int, width: int, rows: int = BATCH, heads: int = HEADS, keys: int = 0, channels: bool = False) -> list:
    """q, k [B, T, keys, D] of length 1, v [B, T, H, D], beta, decay: leaves."""
    g = torch.Generator().manual_seed(0)
    q, k = (F.normalize(torch.randn(rows, tokens, keys or heads, width, generator=g), dim=-1) for _ in range(2))
    v, beta = torch.randn(rows, tokens, heads, width, generator=g), torch.rand(rows, tokens, heads, generator=g)
    decay = -F.softplus(torch.randn(rows, tokens, heads, *[width] * channels, generator=g) - 3)
    return [x.requires_grad_() for x in (q, k, v, beta, decay)]


def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> tuple[Tensor, ...]:
    return delta_rule(q, k, v, beta, decay)


def equations(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> tuple[Tensor, ...]:
    return reference_delta_rule(q, k, v, beta, decay)


def linear(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return (linear_attention(q, k, v)[0],)


def of_transformers(module: str, name: str) -> Any:
    """A function of a model's file, without the kernels that it may be replaced by."""
    transformers()
    path = f"transformers.models.{module}.modeling_{module}"
    found = getattr(importlib.import_module(path), name)
    return getattr(found, "__wrapped__", found)


def transformers_delta(name: str, module: str = "qwen3_next") -> Call:
    function = of_transformers(module, name)

    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> tuple[Tensor, ...]:
        return function(q, k, v, g=decay, beta=beta, initial_state=None, output_final_state=True)  # type: ignore[no-any-return]

    return call


def onnxruntime_delta(name: str, given: list[Tensor]) -> Callable[[], Tensor]:
    """One of its fused operators on these tensors, which are bound; calling it gives y."""
    import onnx
    import onnxruntime

    arrays = [x.detach().contiguous() for x in given]
    (b, t, shared, d), (h, m) = arrays[0].shape, arrays[2].shape[2:]
    if name == "LinearAttention":
        arrays = [x.reshape(b, t, -1) for x in arrays]
        fields, state = {"q_num_heads": shared, "kv_num_heads": h, "update_rule": "gated_delta"}, (b, h, d, m)
        order, out = ("q", "k", "v", "state", "decay", "beta"), torch.empty(b, t, h * m)
    else:
        fields, state = {}, (b, h, m, d)
        order, out = ("q", "k", "v", "", "decay", "beta", "state"), torch.empty(b, t, h, m)
    feeds = dict(zip(("q", "k", "v", "beta", "decay", "state"), (*arrays, torch.zeros(state)), strict=True))
    outs = {"y": out, "end": torch.empty(state)}
    infos = [
        [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, list(x.shape)) for n, x in of.items()]
        for of in (feeds, outs)
    ]
    node = onnx.helper.make_node(name, order, list(outs), domain="com.microsoft", **fields)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "delta", *infos), opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Its threads would wait for work at full speed, on the cores of those that are timed next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    bound = session.io_binding()
    for n, x in feeds.items():
        bound.bind_input(n, "cpu", 0, "float32", list(x.shape), x.data_ptr())
    for n, x in outs.items():
        bound.bind_output(n, "cpu", 0, "float32", list(x.shape), x.data_ptr())

    def run() -> Tensor:
        session.run_with_iobinding(bound)
        return out.view(b, t, h, m)

    run.kept = (feeds, outs)  # type: ignore[attr-defined]
    return run


def zentorch_delta(tensors: list[Tensor]) -> Callable[[], Tensor]:
    """The operator of AMD's plug-in on these tensors: rows in one sequence, chunks of 64 tokens that end with a row."""
    import zentorch  # noqa: F401  its import registers the operator

    (b, t, h, m), d = tensors[2].shape, tensors[0].shape[3]
    q, k, v, beta, decay = (x.detach().reshape(1, b * t, *x.shape[2:]).contiguous() for x in tensors)
    chunks = -(-t // 64)
    starts = torch.arange(0, b * t + 1, t, dtype=torch.int32)
    numbers = torch.tensor([(row, chunk) for row in range(b) for chunk in range(chunks)], dtype=torch.int32)
    offsets = torch.arange(0, b * chunks + 1, chunks, dtype=torch.int32)
    state = torch.zeros(b, h, m, d)
    operator = torch.ops.zentorch.gdn_chunk_gated_delta_rule_fwd

    def run() -> Tensor:
        y, _ = operator(q, k, v, decay, beta, d**-0.5, state, True, 64, starts, numbers, offsets)
        return y.view(b, t, h, m)  # type: ignore[no-any-return]

    return run


def step(call: Call, given: list[Tensor], upstream: Tensor) -> Callable[[], None]:
    """Forward and backward."""

    def run() -> None:
        torch.autograd.grad(call(*given)[0], given, upstream, allow_unused=True)

    return run


def check(calls: dict[str, Call], exact: Call, given: list[Tensor], gradients: bool = True) -> None:
    """Values and gradients beside the equations in float64; the largest difference, of the largest number."""
    wide = [x.detach().double().requires_grad_() for x in given]
    y = exact(*wide)[0]
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    wanted = [y, *(torch.autograd.grad(y, wide, upstream.double()) if gradients else ())]
    for name, call in calls.items():
        y = call(*given)[0]
        found = [y, *(torch.autograd.grad(y, given, upstream) if gradients else ())]
        for a, b in zip(found, wanted, strict=True):
            close = 1e-4 * max(1.0, float(b.detach().abs().max()))
            torch.testing.assert_close(a.double(), b, rtol=0, atol=close, msg=lambda m, name=name: f"{name}: {m}")


def timed(runs: Runs, options: argparse.Namespace, **about: Any) -> dict:
    """A row: medians in milliseconds and the times of all others by that of ours, the first."""
    row = {**about, **summary(race(runs, options.rounds), next(iter(runs)), "of ours")}
    print("  ".join(f"{k} {v}" for k, v in about.items()), "|", cells(row, "of ours"), flush=True)
    gc.collect()
    return row


def gradients(options: argparse.Namespace, channels: bool = False) -> Iterator[dict]:
    calls = {"ours": ours}
    if installed("transformers"):
        name = ("chunk_kimi_delta_attention", "kimi_linear") if channels else ("torch_chunk_gated_delta_rule",)
        calls["transformers"] = transformers_delta(*name)
    for width in options.widths or ([64] if channels else [64, 128]):
        check(calls, equations, draw(CHECKED, width, channels=channels))
        for tokens in options.tokens or ([1024] if channels else [1024, 4096, 16384]):
            given = draw(tokens, width, channels=channels)
            upstream = torch.randn(given[2].shape)
            runs: Runs = {name: step(call, given, upstream) for name, call in calls.items()}
            runs["linear attention"] = step(linear, given[:3], upstream)
            if tokens > options.peers_to:
                runs.pop("transformers", None)
            yield timed(runs, options, tokens=tokens, width=width, kept=kept(ours, given) / given[2].numel())


def decayed(options: argparse.Namespace) -> Iterator[dict]:
    """Mamba-2's sizes: states of 128, heads of 64, one group of B and C, chunks of 256."""

    def mine(c: Tensor, b: Tensor, x: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        return decayed_attention(c, b, x * dt[..., None], dt * a.to(dt.dtype), scale=1.0)

    def exact(c: Tensor, b: Tensor, x: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        return reference_delta_rule(c, b, x * dt[..., None], None, dt * a.to(dt.dtype), scale=1.0)

    def theirs(c: Tensor, b: Tensor, x: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        scan = of_transformers("mamba2", "mamba2_chunk_scan")
        return scan(x, dt, a, b, c, 256, return_final_states=True)  # type: ignore[no-any-return]

    a = -torch.linspace(1, 16, HEADS)
    calls: dict[str, Call] = {"ours": mine} | ({"transformers": theirs} if installed("transformers") else {})
    for tokens in [CHECKED, *(options.tokens or [1024, 4096])]:
        g = torch.Generator().manual_seed(0)
        c, b = (torch.randn(BATCH, tokens, 1, 128, generator=g) for _ in range(2))
        x = torch.randn(BATCH, tokens, HEADS, 64, generator=g)
        dt = F.softplus(torch.randn(BATCH, tokens, HEADS, generator=g) - 3)
        given = [x.requires_grad_() for x in (c, b, x, dt)]
        if tokens == CHECKED:
            check(calls, exact, given)
            continue
        runs: Runs = {name: step(call, given, torch.randn(x.shape)) for name, call in calls.items()}
        yield timed(runs, options, tokens=tokens, state=128, width=64)


def beside_onnxruntime(given: list[Tensor]) -> Runs:
    runs: Runs = {"ours": lambda: delta_rule(*given)}
    if installed("onnxruntime") and installed("onnx"):
        for name in ("GatedDeltaNet", "LinearAttention"):
            runs[ORT + name] = onnxruntime_delta(name, given)
    return runs


@torch.no_grad()
def forward(options: argparse.Namespace) -> Iterator[dict]:
    for width in options.widths or [64, 128]:
        check_onnxruntime(width)
        if installed("zentorch"):
            tensors = draw(CHECKED, width)
            exact = reference_delta_rule(*[x.double() for x in tensors])[0]
            torch.testing.assert_close(zentorch_delta(tensors)().double(), exact, rtol=0, atol=1e-5)
        for tokens in options.tokens or [128, 1024, 4096]:
            tensors = draw(tokens, width)
            runs = beside_onnxruntime(tensors)
            if installed("zentorch"):
                runs["zentorch"] = zentorch_delta(tensors)
            yield timed(runs, options, tokens=tokens, width=width)


@torch.no_grad()
def one_token(options: argparse.Namespace) -> Iterator[dict]:
    sizes = [(1, 8, 8, 64), (2, 8, 8, 64), (1, 8, 8, 128), (2, 8, 8, 128), (1, 32, 16, 128)]
    for batch, heads, keys, width in sizes:
        given = draw(1, width, batch, heads, keys)
        runs = beside_onnxruntime(given)
        if installed("transformers"):
            call = transformers_delta("torch_recurrent_gated_delta_rule")
            runs["transformers"] = lambda call=call, given=given: call(*given)
        yield timed(runs, options, batch=batch, heads=heads, key_heads=keys, width=width)


def check_onnxruntime(width: int) -> None:
    given = draw(CHECKED, width, keys=4)
    exact = reference_delta_rule(*[x.double() for x in given])[0]
    for name, run in beside_onnxruntime(given).items():
        found = run()
        y = found if isinstance(found, Tensor) else found[0]  # type: ignore[index]
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def length(options: argparse.Namespace) -> Iterator[dict]:
    for tokens in options.tokens or [1024, 4096, 16384, 65536, 262144]:
        given = draw(tokens, 64, rows=1, heads=4)
        upstream = torch.randn(given[2].shape)
        square = torch.randn(1024, 1024)
        runs: Runs = {"ours": step(ours, given, upstream), "sgemm": lambda square=square: square @ square}
        row = timed(runs, options, batch=1, heads=4, tokens=tokens, width=64)
        row["ns a token and head"] = 1e6 * row["ms"]["ours"] / tokens / 4
        yield row
        del given, upstream, runs


def convolution(options: argparse.Namespace) -> Iterator[dict]:
    def mine(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return short_convolution(x, weight, bias, activation="silu")

    def exact(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return reference_short_convolution(x, weight, bias, activation="silu")

    def pytorch(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        y = F.conv1d(x.mT, weight[:, None], bias, padding=3, groups=x.shape[2])
        return (F.silu(y[..., : x.shape[1]]).mT,)

    calls: dict[str, Call] = {"ours": mine, "PyTorch": pytorch}
    for tokens, channels in [(CHECKED, 48), (1, 2048), (1024, 1024), (1024, 2048), (4096, 1024), (4096, 2048)]:
        g = torch.Generator().manual_seed(0)
        shapes = (BATCH, tokens, channels), (channels, 4), (channels,)
        given = [torch.randn(shape, generator=g).requires_grad_() for shape in shapes]
        if tokens == CHECKED:
            check(calls, exact, given)
            continue
        upstream = torch.randn(given[0].shape)
        with torch.no_grad():
            plain: Runs = {name: lambda call=call, given=given: call(*given) for name, call in calls.items()}
            yield timed(plain, options, tokens=tokens, channels=channels, gradients=False)
        runs: Runs = {name: step(call, given, upstream) for name, call in calls.items()}
        if tokens > 1:
            yield timed(runs, options, tokens=tokens, channels=channels, gradients=True)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[dict]]] = {
    "gradients": gradients,
    "channels": lambda options: gradients(options, channels=True),
    "decayed": decayed,
    "forward": forward,
    "step": one_token,
    "length": length,
    "convolution": convolution,
}


def main() -> None:
    parser = command(__doc__, rounds=7, threads=2)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--tokens", type=int, nargs="+", help="in place of a part's own")
    parser.add_argument("--widths", type=int, nargs="+", help="of heads, in place of a part's own")
    parser.add_argument("--peers-to", type=int, default=16384, help="tokens up to which transformers is timed")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"backend {mnemos.ops.backends('delta_rule')[0]}, {options.threads} threads, {options.rounds} rounds")
    for name in options.only:
        print(f"\n{name}")
        for row in PARTS[name](options):
            if options.out:
                merge(options.out, name, {**row, "rounds": options.rounds})


def merge(path: Path, part: str, row: dict) -> None:
    """Puts a row into the file, in place of one of the same sizes."""
    found = json.loads(path.read_text()) if path.exists() else {}
    sizes = "width", "batch", "tokens", "heads", "key_heads", "state", "channels", "gradients"
    old = {json.dumps([row.get(x) for x in sizes]): row for row in (*found.get(part, {}).get("rows", []), row)}
    ordered = sorted(old.values(), key=lambda row: [row.get(x) or 0 for x in sizes])
    found[part] = {"rows": ordered, "provenance": provenance(0, "cpu")}
    write_text(path, json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
