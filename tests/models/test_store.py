"""`mnemos.load` on folders that are not what `save` wrote: one line, in little memory. Skeletons of models."""

import hashlib
import json
import resource

import pytest
import torch
from refusals import refuses
from safetensors.torch import load_file, save_file

import mnemos
from mnemos import GRC
from mnemos.config import ModelConfig, from_dict, to_dict
from mnemos.models.store import build_within, skeleton
from mnemos.models.transformer import HeadConfig, Transformer, TransformerConfig


def small(**settings):
    return Transformer(vocab_size=11, dim=16, num_heads=2, layers=2, mlp=32, **settings)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_come_back(tmp_path, monkeypatch, dtype):
    def build(config):
        network = Transformer(config)
        network.register_buffer("unsaved", torch.ones(3), persistent=False)  # as a model of one's own may have
        return network

    monkeypatch.setattr(TransformerConfig, "build", build)
    torch.manual_seed(0)
    for network in (
        small(cache=GRC(length=3), head=HeadConfig(tied=True)).config.build(),
        mnemos.Memformer(vocab_size=11, dim=16, num_heads=2, mlp=32, encoder_layers=1, decoder_layers=1),
    ):
        network.to(dtype).eval()
        mnemos.save(network, tmp_path)
        loaded = mnemos.load(tmp_path)
        for (name, ours), theirs in zip(network.state_dict().items(), loaded.state_dict().values(), strict=True):
            assert ours.dtype == theirs.dtype, name
            assert torch.equal(ours, theirs), name
        tied = [one.head.weight is one.embedding.weight for one in (network, loaded)]
        assert tied == [isinstance(network, Transformer)] * 2
        for ours, theirs in zip(network.buffers(), loaded.buffers(), strict=True):
            assert ours.dtype == theirs.dtype, "buffers that are not saved, too"
        x = torch.randint(11, (2, 6))
        assert torch.equal(network(x)[0], loaded(x)[0])


def test_layers_of_different_dtypes_come_back(tmp_path):
    network = small()
    network.blocks[1].double()
    network.final_norm.bfloat16()
    mnemos.save(network, tmp_path)
    found = mnemos.load(tmp_path).state_dict()
    for name, ours in network.state_dict().items():
        assert ours.dtype == found[name].dtype, name
        assert torch.equal(ours, found[name]), name


def test_equal_models_are_equal_files(tmp_path):
    """Also where several names share a tensor: the file lists them."""
    network = mnemos.EncoderDecoder(vocab_size=9, dim=8, encoder_layers=1, decoder_layers=1, num_heads=2, mlp=8)
    found = set()
    for _ in range(8):
        mnemos.save(network, tmp_path)
        found.add((tmp_path / "model.safetensors").read_bytes())
    assert len(found) == 1
    shared = b'"__metadata__":{"head.weight":"embedding.weight","source_embedding.weight":"embedding.weight"}'
    assert shared in found.pop()
    assert torch.equal(mnemos.load(tmp_path).head.weight, network.embedding.weight)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("final_norm.weight", torch.zeros(16, dtype=torch.int64), r"torch.int64 \(16,\) in the file"),
        ("final_norm.weight", torch.zeros(16, 1), r"torch.float32 \(16, 1\) in the file, .* \(16,\) in the model"),
        ("final_norm.other", torch.zeros(16), r"final_norm.other: .* in the file, none in the model"),
        ("final_norm.weight", None, "final_norm.weight"),
    ],
)
def test_other_weights_are_refused(tmp_path, name, value, words):
    """With the digest that fits them."""
    mnemos.save(small(), tmp_path)
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = {n: x for n, x in (load_file(path) | {name: value}).items() if x is not None}
    save_file(tensors, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sha256": digest}))
    refuses(rf"model.safetensors: expected this model's weights.*{words}", mnemos.load, tmp_path)


@pytest.mark.parametrize(("field", "value"), [("layers", 10**12), ("dim", 10**12 + 1), ("vocab_size", 2**70)])
def test_huge_settings_end_in_one_line(tmp_path, field, value):
    mnemos.save(small(), tmp_path)
    file = tmp_path / "config.json"
    about = json.loads(file.read_text())
    about["model"][field] = value
    file.write_text(json.dumps(about))
    refuses(r"config\.json: ", mnemos.load, tmp_path)


def test_a_small_file_stops_many_layers_early(monkeypatch):
    """A hundred thousand layers took minutes. The number of layers that are made shows where it stops, not the time."""
    made, before = [], torch.nn.Linear.__init__
    monkeypatch.setattr(torch.nn.Linear, "__init__", lambda *sizes, **settings: made.append(before(*sizes, **settings)))
    config = from_dict(ModelConfig, {**to_dict(small().config), "layers": 100_000})
    made.clear()
    refuses("expected a model of 30 tensors with 9,000 values", build_within, config, 30, 9_000)
    assert 10 < len(made) < 200


class Builds:
    """A configuration that builds this."""

    def __init__(self, build):
        self.build = build


EXCESS = {
    "1 tensors with 1,099,511,627,776 values": lambda: torch.nn.Linear(2**20, 2**20),
    "205 tensors with 205 values": lambda: torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(1_000)),
    "17 tensors with 71,303,168 values": lambda: torch.nn.ParameterList(torch.empty(2**22) for _ in range(100)),
}


@pytest.mark.parametrize("words", EXCESS)
def test_each_kind_of_excess_is_refused(words):
    """Alone: a huge setting exceeds several limits at once, so that one that is missing would not be noticed."""
    refuses(f"1 tensors with 100 values, .*, found .* that need {words}", build_within, Builds(EXCESS[words]), 1, 100)


@pytest.mark.parametrize(("error", "words"), [("", "ValueError"), ("too\n  long", "too long"), ("a" * 300, "a{200}")])
def test_settings_that_cannot_be_built_are_named(error, words):
    def build():
        raise ValueError(error)

    refuses(rf"cannot be built \(ValueError: {words}\)", build_within, Builds(build), 1, 100)


def test_damaged_and_foreign_folders_are_refused(tmp_path):
    refuses(r"with config\.json", mnemos.load, tmp_path)
    mnemos.save(small(), tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, settings = weights.read_bytes(), config.read_text()
    digest = f', "sha256": "{hashlib.sha256(whole).hexdigest()}"}}'
    for data, text, words in (
        (whole[:-100], settings, r"model.safetensors: .*bytes"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), settings, r"model.safetensors: .*bytes"),
        (whole, settings.replace('"dim": 16', '"dim": 32'), r"model.safetensors: .*weights"),
        (whole, settings.replace('"dim"', '"dmi"'), "did you mean 'dim'"),
        (b"x", settings.replace(hashlib.sha256(whole).hexdigest(), hashlib.sha256(b"x").hexdigest()), "this model's w"),
        (whole, "[]", "expected a model and its sha256"),
        (whole, '{"model": {}, "sha256": ""}', "'is' is missing"),
        (whole, '{"model": {"is": [1]}, "sha256": ""}', "registered class"),
        (whole, "[" * 100_000, "config.json: .*nested too deeply"),
        (whole, '{"model": {"is": "transformer", "layers": ' + "9" * 5_000 + "}" + digest, "config.json: .*digits"),
    ):
        weights.write_bytes(data)
        config.write_text(text)
        refuses(words, mnemos.load, tmp_path)
    refuses("save its state_dict", mnemos.save, torch.nn.Linear(2, 2), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    grown = small()
    grown.more = torch.nn.Linear(2, 2)
    refuses("save: expected the tensors that the model's config builds", mnemos.save, grown, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    (tmp_path / "file").touch()
    refuses("file: expected a folder", mnemos.save, small(), tmp_path / "file")


@pytest.mark.parametrize(
    "config",
    [
        TransformerConfig(vocab_size=11, dim=16, layers=2, num_heads=2, max_length=8, cache=GRC()),
        mnemos.MemformerConfig(vocab_size=11, dim=16, num_heads=2),
    ],
    ids=lambda config: config.name,
)
def test_modules_names_and_shapes_of_a_skeleton_are_those_of_the_model(config):
    model, bare = config.build(), skeleton(config)
    assert {n: (p.shape, p.dtype) for n, p in bare.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in model.named_parameters()
    }
    assert [(n, type(m), m.extra_repr()) for n, m in bare.named_modules()] == [
        (n, type(m), m.extra_repr()) for n, m in model.named_modules()
    ]


def test_no_memory_is_touched_and_no_random_number_is_drawn():
    before = torch.get_rng_state()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bare = skeleton(TransformerConfig(vocab_size=300_000, dim=1024, layers=1, num_heads=2, max_length=8))
    assert sum(p.numel() for p in bare.parameters()) > 300_000_000  # 1.2 GB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300_000  # KiB on Linux; less on macOS
    assert torch.equal(before, torch.get_rng_state())
