"""Exported programs answer as the model does: any number of rows and tokens, cut anywhere, from state to state."""

import copy
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from contract_cases import ATTENTIONS, MODELS, ModelCase, has, scatter
from refusals import refuses
from torch import nn

import mnemos
from mnemos import registry
from mnemos.hugging_face import MnemosForCausalLM
from mnemos.lab.cli import main
from mnemos.programs.export import Programs, after, export_programs, onnx_graph
from mnemos.programs.forms import adapt
from mnemos.types import InputError, leaves, likelihood_of

CUTS = 1, 3, 1, 1, 6, 1, 1, 2  # lengths of calls: over two segments of 4 tokens, and from within one


def small(name, **fields):
    config = registry.load("model", name)
    one = {field: 1 for field in ("layers", "decoder_layers") if has(config, field)}
    return ModelCase(name, None, True).build(**one, **fields).float().eval()


def attention(config, **fields):
    position = "none" if "relative" in config.name or config.name == "compressive" else "sinusoidal"
    return small("transformer", attention=config, **{"position": position} | fields)


def cached_of_each_row():
    """Rotated keys that grow, and a gated cache of each row: a loop over tokens, and a branch at the end of a block."""
    plain = small("transformer", position="rotary", dim=16).config
    return scatter(dataclasses.replace(plain, cache=mnemos.GRC(length=3, scope="stream")).build()).float().eval()


CASES = {
    **{str(case): (lambda case=case: case.build().float().eval()) for case in MODELS if case.predicts},
    **{name: (lambda one=one: attention(one)) for name, one in ATTENTIONS.items() if True in one.causal_modes},
    **{
        map: (lambda map=map: attention(mnemos.LinearConfig(feature_map=map)))
        for map in ("relu", "polynomial", "favor")
    },
    "gated-delta-grouped": lambda: attention(mnemos.GatedDeltaConfig(key_heads=1)),
    "learned": lambda: small("transformer", position="learned", max_length=32),
    "rotary": lambda: small("transformer", position="rotary", dim=16),
    "rmt-rotary": lambda: small("rmt", position="rotary", dim=16),
    "cached": cached_of_each_row,
    "adaptive": lambda: small("lstm", cutoffs=(5, 9), tied=True),
    "mixture": lambda: small("transformer", head=mnemos.HeadConfig(mixture=3)),
    "memformer-paper": lambda: small("memformer", preset="paper", decoder_reads=True),
}
del CASES["reformer"]


def in_torch(programs, name):
    found = getattr(programs, name).module()

    def run(tokens, state):
        with torch.no_grad():
            return found(tokens, state)

    return run


def in_onnxruntime(programs, name):
    runtime = pytest.importorskip("onnxruntime")
    names = list(programs.state)
    graph = onnx_graph(getattr(programs, name), ["tokens", *names], ["outputs", *map(after, names)])
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1, 3
    session = runtime.InferenceSession(graph.model_proto.SerializeToString(), settings)

    def run(tokens, state):
        found = session.run(None, {"tokens": tokens.numpy(), **{name: x.numpy() for name, x in state.items()}})
        outputs, *found = map(torch.from_numpy, found)
        return outputs, dict(zip(names, found, strict=True))

    return run


def compare(model, programs, runner, cuts=CUTS):
    """The program's outputs for two new rows, call by call, with those of the model in float64.

    A program may be as far from them as the model itself is: over segments the random weights of RMT carry a rounding
    error on, so that model and program are both up to 4e-5 from what is exact, and further from each other.
    """
    exact = copy.deepcopy(model).double()
    runs = {name: runner(programs, name) for name in ("step", "prefill")}
    generator, said = torch.Generator().manual_seed(5), []
    for rows in (1, 2):
        found = {name: x.expand(rows, *x.shape[1:]).contiguous() for name, x in programs.state.items()}
        states = [one.initial_state(rows) for one in (model, exact)]
        if programs.encode is not None:
            source = torch.randint(model.config.vocab_size, (rows, 7), generator=generator)
            states = [one.encode(source) for one in (model, exact)]
            with torch.no_grad():
                found = programs.encode.module()(source, torch.ones(rows, 7, dtype=torch.bool))
        for t in cuts:
            tokens = torch.randint(model.config.vocab_size, (rows, t), generator=generator)
            outputs, found = runs["step" if t == 1 else "prefill"](tokens, found)
            with torch.no_grad():
                answers = [one(tokens, state) for one, state in zip((model, exact), states, strict=True)]
                both, states = zip(*answers, strict=True)
                if hasattr(likelihood_of(model), "log_prob"):
                    both = [likelihood_of(one).log_prob(y) for one, y in zip((model, exact), both, strict=True)]
            said.append((outputs, *both))
        for (name, x), shape in zip(found.items(), programs.shapes.values(), strict=True):
            assert all(n == of for n, of in zip(x.shape, shape, strict=True) if isinstance(of, int)), name
    error = max(float((own - right).abs().max()) for _, own, right in said)
    for outputs, _, right in said:
        torch.testing.assert_close(outputs.double(), right, rtol=1e-4, atol=max(2e-5, error))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("runner", [in_torch, in_onnxruntime])
def test_every_streaming_model(name, runner):
    model = CASES[name]()
    compare(model, export_programs(model), runner)


FORGETTING = ["delta", "gated-delta-grouped", "kimi-delta", "gla", "retention", "mamba2"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FORGETTING)
def test_a_program_of_onnxruntime_s_own_kernels(name):
    pytest.importorskip("onnxruntime")
    model = CASES[name]()
    programs = export_programs(model, "onnxruntime")
    compare(model, programs, in_onnxruntime)
    names = list(programs.state)
    graph = onnx_graph(programs.step, ["tokens", *names], ["outputs", *map(after, names)]).model_proto.graph
    found = {node.op_type for node in graph.node if node.domain == "com.microsoft"}
    convolved = hasattr(model.blocks[0].attention, "convolution")
    assert found == {"LinearAttention"} | ({"CausalConvWithState"} if convolved else set())


@pytest.mark.parametrize(("name", "tokens"), [*((name, 1) for name in FORGETTING), ("cached", 6)])
def test_tokens_in_the_form_of_a_program(name, tokens):
    """Before the export, which takes seconds: tests/lab/run/test_export.py has a program without a loop."""
    model, tokens = CASES[name](), torch.arange(1, tokens + 1)[None]
    with torch.no_grad():
        _, state = model(torch.arange(5)[None])
        wanted, end = model(tokens, state)
        found, after = adapt(model)(tokens, state)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for a, b in zip(leaves(after), leaves(end), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_an_export_leaves_nothing_to_the_next():
    """Guards of an earlier program's loop fixed the number of tokens of the next one's."""
    for config in (mnemos.SoftmaxConfig(window=6), mnemos.LinearConfig()):
        model = attention(config, cache=mnemos.GRC(length=3, scope="stream"), position="none")
        compare(model, export_programs(model), in_torch)


@pytest.mark.exhaustive  # tests/test_readme.py runs the example
def test_the_example_of_the_page_runs_without_pytorch(tmp_path):
    """The lines of docs/export.md, in a process that cannot import PyTorch or this library."""
    pytest.importorskip("onnxruntime")
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    lines = re.search(r"# From here on without PyTorch:\n(.*?)```\n```text\n(.*?)```", page, re.DOTALL)
    model = attention(mnemos.LinearConfig(), vocab_size=256)
    mnemos.save(model, tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--to", "onnxruntime", "--out", str(tmp_path / "program")]) == 0
    code = "import sys\nsys.modules['torch'] = sys.modules['mnemos'] = None\n" + lines[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == lines[2].split(), done.stderr
    about = json.loads((tmp_path / "program" / "program.json").read_text())
    assert about["outputs are"] == "logits"
    names = [one["name"] for one in about["inputs"]]
    assert names == ["tokens", *np.load(tmp_path / "program" / "state.npz")]
    graph = pytest.importorskip("onnx").load(tmp_path / "program" / "prefill.onnx").graph
    assert [one.name for one in graph.input] == names
    assert [one.name for one in graph.output] == [one["name"] for one in about["outputs"]]
    assert "LinearAttention" in {node.op_type for node in graph.node}


class Whole(nn.Module):
    """A model of another package around a reader of tokens."""

    autoregressive = True

    def __init__(self, reader):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.reader = reader

    def initial_state(self, batch_size, device=None, dtype=None):
        return torch.zeros(batch_size, 1)

    def forward(self, x, state=None, mask=None):
        return self.reader(x), state + 1


class Counting(Whole):
    """With a count of tokens, which is no tensor, in its state."""

    def initial_state(self, batch_size, device=None, dtype=None):
        return torch.zeros(batch_size, 1), 0

    def forward(self, x, state=None, mask=None):
        return self.reader(x), (state[0], state[1] + x.shape[1])


class ByValue(nn.Module):
    def forward(self, x):
        return x[..., None].float() if bool(x.sum() > 0) else x[..., None].float() + 1


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.after = nn.Linear(1, 1)

    def forward(self, x):
        return self.after(torch.stack([x[:, t, None].float() for t in range(x.shape[1])], 1))


class Kernel(nn.Module):
    def forward(self, x):
        q = x[..., None, None].float()
        return mnemos.ops.linear_attention(q, q, q)[0].flatten(2)


class Solved(nn.Module):
    def forward(self, x):
        x = x[..., None].float()
        return torch.linalg.solve(torch.eye(1) + x.mT @ x, x.mT).mT


def decoder_of_theirs() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, n_positions=8)
    return mnemos.functional(transformers.GPT2LMHeadModel(config))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda: ModelCase("transformer", None, False).build().float(),
            "with a state, found Transformer that predicts no next token",
        ),
        (lambda: attention(ATTENTIONS["softmax"]).bfloat16(), "torch.bfloat16"),
        (lambda: Whole(ByValue()), r"reader \(ByValue\)"),
        pytest.param(
            lambda: Whole(Loop()), r"reader \(Loop\) \(its code fixes the number of tokens", marks=pytest.mark.slow
        ),
        (lambda: Whole(Kernel()), r"mnemos\.linear_attention\.default in reader, which has no form"),
        (lambda: Counting(nn.Identity()), "a tensor, 0 in a new row and a tensor, 2 after two tokens"),
        (decoder_of_theirs, "found GPT2LMHeadModel of Transformers"),
        pytest.param(
            lambda: attention(ATTENTIONS["reformer"]),
            r"blocks\.0\.attention \(ReformerAttention\) .*rotations",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["classifier", "bfloat16", "reads-a-value", "loop", "our-operator", "count", "of-theirs", "reformer"],
)
def test_what_is_not_exportable_is_named(build, says, tmp_path, capsys):
    refuses(says, mnemos.export, build(), tmp_path / "out", "torch")
    assert "def forward" not in capsys.readouterr().err  # PyTorch prints the graph of what fails
    assert not (tmp_path / "out").exists()


def test_an_operation_that_onnx_lacks_is_named():
    pytest.importorskip("onnxscript")
    with pytest.raises(InputError, match=r"operations that ONNX has, found aten\.\S*solve\S* in reader") as caught:
        in_onnxruntime(export_programs(Whole(Solved())), "step")
    assert "\n" not in str(caught.value)


def test_a_part_that_computes_in_its_own_way_has_no_form():
    """A form in its place would leave out what it computes, and no error would say so."""

    class Doubled(mnemos.LSTM):
        def forward(self, x, state=None, mask=None):
            y, state = super().forward(x, state, mask)
            return 2 * y, state

    changed = attention(ATTENTIONS["linear"])
    layer = changed.blocks[0].attention
    attend = layer.attend
    layer.attend = lambda q, k, v, state, mask: attend(2 * q, k, v, state, mask)
    for model in (Doubled(small("lstm").config).eval(), changed):
        _, state = model(torch.arange(4)[None])
        found, wanted = (one(torch.ones(1, 1, dtype=torch.int64), state)[0] for one in (adapt(model), model))
        torch.testing.assert_close(found, wanted)


def test_a_program_has_no_gradient():
    """A state that carried one would hold all steps before it; loops and branches raise an error."""
    model = small("transformer", head=mnemos.HeadConfig(tied=True))
    adapted = adapt(model)
    y, state = adapted(torch.ones(1, 1, dtype=torch.int64), model.initial_state(1))
    assert not any(x.requires_grad for x in (y, *leaves(state)))
    assert adapted.head.weight is adapted.embedding.weight
    assert all(x.requires_grad for x in model.parameters())


def test_nothing_half_written(tmp_path, monkeypatch):
    def full(*given):
        raise OSError("no space left")

    monkeypatch.setattr("mnemos.programs.export.export_programs", lambda *given: Programs("step", None, None, {}, {}))
    monkeypatch.setattr("torch.export.save", full)
    model = attention(ATTENTIONS["linear"])
    with pytest.raises(OSError, match="no space left"):
        mnemos.export(model, tmp_path / "out", "torch")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("kept")
    for call, says in (
        (lambda: mnemos.export(model, tmp_path), "new or empty folder"),
        (lambda: mnemos.export(model, tmp_path / "out", "tflite"), "to='onnx'"),
        (lambda: mnemos.export(model.double(), tmp_path / "out"), r"of torch\.float32 .* found torch\.float64"),
        (lambda: export_programs(MnemosForCausalLM.of(model)), r"give its \.model"),
    ):
        refuses(says, call)


def test_a_widened_state_is_read_as_the_state():
    """By the model itself, whose own states are as short as they can be."""
    for name in ("rmt", "armt", "memory-transformer", "memformer"):
        model = small(name)
        tokens = torch.arange(10).expand(2, 10)
        with torch.no_grad():
            _, state = model(tokens[:, :5])
            wide = model.pad_to_capacity(state)
            assert sum(x.numel() for x in leaves(wide)) > sum(x.numel() for x in leaves(state))
            torch.testing.assert_close(model(tokens[:, 5:], wide)[0], model(tokens[:, 5:], state)[0])
