"""`mnemos.fast` for any model: its dense layers by oneDNN, with equal outputs and gradients, and what is around."""

import pytest
import torch
from functional_models import CLOSE, agree, build, run, tokens, vit
from module_surgery import WAYS, hook_after
from torch import nn

import mnemos
from mnemos.ops import dense_layer

pytestmark = pytest.mark.skipif(dense_layer.why_no_onednn() != "", reason="this PyTorch has no oneDNN")


@pytest.fixture
def products(monkeypatch):
    """The shapes of weights that oneDNN multiplies by; it computes products of any size, and their gradients."""
    seen, product = [], dense_layer._product

    def counted(x, weight, bias):
        seen.append(tuple(weight.shape))
        return product(x, weight, bias)

    monkeypatch.setattr(dense_layer, "_product", counted)
    monkeypatch.setattr(dense_layer, "_few_rows", lambda x: False)
    monkeypatch.setattr(dense_layer, "WIDE", 0)
    with dense_layer.using(dense_layer.Choice(1, 1, 1)):
        yield seen


def encoder(batch_first):
    layer = nn.TransformerEncoderLayer(20, 4, 28, dropout=0.0, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 9, 20)


def cross(**options):
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.MultiheadAttention(20, 4, **options)

        def forward(self, x):
            return self.heads(x, x[:4, :, : options.get("kdim", 20)], x[:4, :, : options.get("vdim", 20)])[0]

    return Cross(), torch.randn(9, 2, 20)


# The model, its input, how many layers are dense, and how many of their products oneDNN computes in a call.
MODELS = {
    "Llama": (lambda: (build("Llama"), tokens(2, 9)), 15, 15),
    "GPT-2": (lambda: (build("GPT2"), tokens(2, 9)), 9, 9),
    "BERT": (lambda: (build("Bert"), tokens(2, 9)), 14, 14),
    "ViT": (lambda: (vit(), torch.randn(2, 3, 32, 32)), 9, 8),  # its head reads a slice
    "torch": (lambda: encoder(False), 6, 8),
    "torch, rows first": (lambda: encoder(True), 6, 6),  # PyTorch's heads project a transposed view
    "heads of two widths": (lambda: cross(kdim=12, vdim=8), 1, 2),
    "heads": (lambda: cross(), 1, 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_any_model_has_equal_outputs_and_gradients(name, products):
    make, layers, called = MODELS[name]
    torch.manual_seed(0)
    model, x = make()
    model.train()  # in evaluation PyTorch's encoder runs a kernel of its own
    wanted, names = run(model, x), list(model.state_dict())
    assert not products
    with mnemos.fast(model) as report:
        assert len(report.dense) == layers
        with torch.no_grad():
            y = model(x)
        torch.testing.assert_close(getattr(y, "logits", y), wanted[0], **CLOSE)
        assert len(products) == called
        agree(run(model, x), wanted)
        assert list(model.state_dict()) == names
    assert not any("forward" in vars(layer) for layer in model.modules())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [True, False])
def test_what_is_around_a_layer_or_in_its_place_counts(way, first, products):
    """Before the call or after it."""
    models = [build("Llama"), build("Llama")]
    names = [name for name, part in models[0].named_modules() if type(part) is nn.Linear]
    if first:
        mnemos.fast(models[1])
    for model in models:
        for name in names[::3]:
            way(model, name)
    if not first:
        mnemos.fast(models[1])
    agree(run(models[1], tokens(2, 9)), run(models[0], tokens(2, 9)))
    assert products


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")
@pytest.mark.parametrize("first", [True, False])
def test_adapters_of_peft_and_tied_weights(first, products):
    peft, x, outputs = pytest.importorskip("peft"), tokens(2, 9), []
    for fast in (False, True):
        model = build("Llama", tie_word_embeddings=True)
        if fast and first:
            mnemos.fast(model)
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        if fast and not first:
            assert "base_model.model.model.layers.0.self_attn.q_proj.base_layer" in mnemos.fast(model).dense
        found = run(model, x)
        merged = model.merge_and_unload()
        assert merged.lm_head.weight is merged.model.embed_tokens.weight
        outputs.append((*found, merged(x).logits))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-3, atol=2e-5)


def test_compiled_and_exported_models(products):
    model, x = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)), torch.randn(3, 6)
    wanted = model(x)
    report = mnemos.fast(model)
    torch.testing.assert_close(model(x), wanted)
    count = len(products)
    for heads in (model, encoder(False)[0].layers[0].self_attn):
        mnemos.fast(heads)
        given = (x,) if heads is model else (torch.randn(9, 2, 20),) * 3
        compiled = torch.compile(heads, backend="eager", fullgraph=True)(*given)
        torch.testing.assert_close(compiled, heads(*given))
    assert len(products) > count
    program = torch.export.export(model, (x,))
    assert "mkldnn" not in str(program.graph)
    report.undo()
    assert torch.equal(model(x), wanted)


def test_gates_of_a_cache_keep_their_kernel():
    model = build("Llama")
    mnemos.cache(model, mnemos.GRC(length=3, block=2, scope="stream"))
    inside = {name for name, part in model.named_modules() if type(part).__module__.startswith("mnemos.")}
    report = mnemos.fast(model)
    assert len(report.dense) == 15
    assert inside
    assert not {name.rpartition(".")[0] for name in report.dense} & inside


def test_a_forward_of_another_library_stays():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    hook_after(model, "1")
    model[0].forward = own = lambda x: 2 * x
    assert mnemos.fast(model).dense == ("1",)
    assert model[0].forward is own
