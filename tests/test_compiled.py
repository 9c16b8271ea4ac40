"""What is written of a compiled model, whole or in parts, is the model's own; other wrappers are refused."""

import functools

import pytest
import torch
from refusals import refuses
from torch import nn

import mnemos
from mnemos import Stream, Transformer
from mnemos.hugging_face import MnemosForCausalLM
from mnemos.lab.run.recipe import TrainConfig
from mnemos.modes import plain_module

compiling = functools.partial(torch.compile, backend="eager")


def _parts(model: nn.Module) -> nn.Module:
    layers = model.blocks if isinstance(model, Transformer) else model.layers
    layers[0] = compiling(layers[0])
    return model


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


class Distributed(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


WAYS = {"whole": compiling, "parts": _parts, "in place": _in_place}
WRAPPERS = (nn.DataParallel, Distributed, torch.optim.swa_utils.AveragedModel)


def built(layers: int = 1) -> Transformer:
    torch.manual_seed(0)
    return Transformer(vocab_size=11, dim=16, layers=layers, num_heads=2, mlp=24, attention="linear").eval()


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True), 1).eval()


IDS = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["whole", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("parts", "in place"))])
def way(request):
    return WAYS[request.param]


def test_models_are_read_again(way, tmp_path):
    model, wanted = way(built()), built()(IDS)[0]
    mnemos.save(model, tmp_path / "own")
    assert torch.equal(mnemos.load(tmp_path / "own")(IDS)[0], wanted)
    MnemosForCausalLM.of(model).save_pretrained(tmp_path / "theirs")
    assert torch.equal(MnemosForCausalLM.from_pretrained(tmp_path / "theirs").eval()(IDS).logits, wanted)
    inside = MnemosForCausalLM.of(built())
    inside.model = way(inside.model)
    inside.save_pretrained(tmp_path / "inside")
    assert torch.equal(MnemosForCausalLM.from_pretrained(tmp_path / "inside").eval()(IDS).logits, wanted)


def test_states_go_between_the_compiled_model_and_the_model(way, tmp_path):
    file, state = tmp_path / "x", built()(IDS)[1]
    for writer, reader in ((way(built()), built()), (built(), way(built()))):
        Stream(writer).prefill(IDS).save(file)
        found = Stream.restore(reader, file)
        torch.testing.assert_close(found.predict(), Stream(built()).prefill(IDS).predict())
        mnemos.save_state(state, file, writer)
        mnemos.load_state(file, reader, like=state)


def test_cached_hosts_are_read_again(tmp_path):
    model, x = _parts(encoder()), torch.randn(2, 5, 16)
    mnemos.cache(model, mnemos.GRC(length=3, gate_init=0.0))
    model.train()(x)
    mnemos.hosts.save(model.eval(), tmp_path / "x")
    found = mnemos.hosts.load(compiling(encoder()), tmp_path / "x").eval()
    torch.testing.assert_close(found(x), model(x))


def test_a_run_has_the_names_of_the_model(way, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", compiling)
    data = [(torch.randn(4, 5, 16), torch.randn(4, 5, 16).argmax(-1))] * 2
    mnemos.fit(way(encoder()), data, data, tmp_path / "run", steps=1, quiet=True)
    plain, settings = encoder(), TrainConfig(compile=way is not _in_place)
    mnemos.fit(plain, data, data, tmp_path / "run", steps=1, quiet=True, train=settings, resume=True)
    assert not torch.equal(next(plain.parameters()), next(encoder().parameters()))


def test_wrappers_that_are_not_the_model_are_refused(tmp_path):
    data = [(torch.randn(4, 5, 16), torch.zeros(4, 5, dtype=torch.int64))]
    for wrapper in WRAPPERS:
        for call in (
            lambda m: mnemos.save(m, tmp_path / "x"),
            lambda m: mnemos.hosts.save(m, tmp_path / "x"),
            lambda m: mnemos.save_state(torch.zeros(1), tmp_path / "x", m),
            lambda m: mnemos.export(m, tmp_path / "x"),
            lambda m: mnemos.fit(m, data, data, tmp_path / "x"),
            lambda m: mnemos.testing.check_memory(m, width=16),
            MnemosForCausalLM.of,
        ):
            for model in (wrapper(built()), compiling(wrapper(built()))):
                refuses("expected a model itself", call, model)
    assert not list(tmp_path.iterdir())


def test_what_is_no_model_is_refused(tmp_path):
    for call in (
        lambda: mnemos.save(None, tmp_path / "x"),
        lambda: mnemos.hosts.save(3, tmp_path / "x"),
        lambda: mnemos.export(len, tmp_path / "x"),
        lambda: MnemosForCausalLM.of(None),
        lambda: mnemos.save_state(torch.zeros(1), tmp_path / "x", len),
    ):
        refuses(r"found (NoneType|int|builtin_function_or_method); give the model itself", call)


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    model = built()
    nn.utils.parametrizations.weight_norm(model.head)
    for call in (lambda: mnemos.save(model, tmp_path / "x"), lambda: MnemosForCausalLM.of(model)):
        refuses("expected the tensors that the model's config builds", call)


def test_the_plain_module_shares_all_tensors_and_changes_nothing():
    model = _parts(built(layers=2))
    tied = model.blocks[1].mlp = model.blocks[0].mlp  # a part with two names
    plain = plain_module(compiling(model), "test")
    assert plain.blocks[1].mlp is plain.blocks[0].mlp is tied
    assert hasattr(model.blocks[0], "_orig_mod")
    assert {*map(id, plain.parameters())} == {*map(id, model.parameters())}
    assert plain_module(tied, "test") is tied
