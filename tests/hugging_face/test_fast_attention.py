"""`mnemos.fast`: softmax attention of Transformers on our kernels: equal logits, gradients and generated tokens."""

import pytest
import torch
from functional_models import CLOSE, agree, build, cached, run, tokens, vit
from refusals import refuses

import mnemos
from mnemos.attention import softmax
from mnemos.hugging_face import fast_attention
from mnemos.libraries import transformers

pytestmark = pytest.mark.skipif(not mnemos.native.instruction_sets(), reason="the kernels are not built")
LENGTH = 37


def llama():
    """Heads of keys that two heads of queries share, and scores of another scale than the usual."""
    model = build("Llama")
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.9
    return model


MODELS = {"Llama": llama, "Mistral": lambda: build("Mistral", sliding_window=7)}
MODELS |= {name: lambda name=name: build(name) for name in ("GPT2", "Qwen3Next", "Bert")}


@pytest.fixture
def calls(monkeypatch):
    """How our kernels are called, for any sizes: causal, the window, and whether there is padding."""
    seen, attend = [], fast_attention.softmax_attention

    def counted(q, k, v, causal, window=None, valid=None, scale=None):
        seen.append((causal, window, valid is not None))
        return attend(q, k, v, causal, window, valid, scale)

    monkeypatch.setattr(fast_attention, "softmax_attention", counted)
    for name in ("FEWEST_QUERIES", "FEWEST_KEYS", "LEAST"):
        monkeypatch.setattr(softmax, name, 1)
    return seen


def masks():
    """None, padding on the left, on the right and between tokens."""
    some = torch.ones(2, LENGTH, dtype=torch.long)
    left, right, between = some.clone(), some.clone(), some.clone()
    left[1, :5], right[1, 30:], between[1, [3, 17, 18]] = 0, 0, 0
    return {"none": None, "left": left, "right": right, "between": between}


@pytest.mark.parametrize("padding", masks())
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name, padding, calls):
    model, x, mask = MODELS[name](), tokens(2, LENGTH), masks()[padding]
    wanted = run(model, x, mask)
    assert not calls
    with mnemos.fast(model) as report:
        agree(run(model, x, mask), wanted)
    window = 7 if name == "Mistral" else None
    assert calls == [(name != "Bert", window, padding != "none")] * len(report.attentions)


def test_pictures_of_timm(calls):
    model, x = vit(), torch.randn(2, 3, 32, 32)
    wanted = run(model, x)
    assert mnemos.fast(model).attentions == ("blocks.0.attn", "blocks.1.attn")
    agree(run(model, x), wanted)
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT2"])
@torch.no_grad()
def test_generation_with_a_cache_and_pieces_of_a_prompt(name, calls):
    model, x, mask = MODELS[name](), tokens(2, LENGTH), masks()["left"]
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(x, **options)

    theirs = cached(model, x, [11, 19, 7], mask)[0]
    with mnemos.fast(model):
        assert torch.equal(model.generate(x, **options), wanted)
        calls.clear()
        ours = cached(model, x, [11, 19, 7], mask)[0]
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], **CLOSE)
    assert len(calls) >= 4


@torch.no_grad()
def test_what_does_not_fit_is_theirs(calls, monkeypatch):
    model, x = MODELS["Llama"](), tokens(2, LENGTH)
    own = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.7
    own |= torch.eye(LENGTH, dtype=torch.bool)
    wanted = [model(x, attention_mask=mask).logits for mask in (own, own.float().log())]
    with mnemos.fast(model) as report:
        assert len(report.attentions) == 2
        for mask, logits in zip((own, own.float().log()), wanted, strict=True):
            torch.testing.assert_close(model(x, attention_mask=mask).logits, logits, **CLOSE)
        model.train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        model(x)
        model.eval().double()
        model(x)
        assert not calls
        model.float().set_attn_implementation("eager")
        model(x)
        assert not calls
        model.set_attn_implementation("sdpa")
        model(x)
        assert len(calls) == 2
        registry = transformers().AttentionInterface
        monkeypatch.setitem(
            registry._global_mapping, "sdpa", lambda module, q, k, v, *_, **__: (q.transpose(1, 2), None)
        )
        model(x)  # an attention of the user's
        assert len(calls) == 2


@torch.no_grad()
def test_a_mask_is_read_again_where_it_may_have_been_written_into(calls):
    """A mask of the user's own, and masks of inference mode, which do not count their writes."""
    model, x = MODELS["Llama"](), tokens(1, 5)
    for scope in (torch.no_grad, torch.inference_mode):
        with scope():
            mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
            wanted = [model(x, attention_mask=mask).logits, model(x, attention_mask=mask.fill_(True)).logits]
            with mnemos.fast(model):
                y = model(x, attention_mask=mask.tril_()).logits, model(x, attention_mask=mask.fill_(True)).logits
            torch.testing.assert_close(list(y), wanted, **CLOSE)
            assert [causal for causal, *_ in calls] == [True, True, False, False]
            calls.clear()


def test_with_functional_caches_and_linearised_attentions(calls):
    """In both orders where there are two."""
    x, plain = tokens(2, 12), MODELS["Llama"]
    model = plain()
    wanted = model(x).logits
    step = mnemos.functional(model)
    mnemos.fast(model)
    y, state = step(x[:, :5])
    rest, _ = step(x[:, 5:], state)
    torch.testing.assert_close(torch.cat([y, rest], 1), wanted, **CLOSE)
    early, late, linear = plain(), plain(), plain()
    mnemos.fast(early)
    for model in (early, late):
        torch.manual_seed(0)
        mnemos.cache(model, mnemos.GRC(length=3, block=2, scope="stream", gate_init=0.0))
    mnemos.linearise(linear, window=3, sinks=1)
    for model in (late, linear):
        wanted = model(x).logits
        mnemos.fast(model)
        torch.testing.assert_close(model(x).logits, wanted, **CLOSE)
    mnemos.fast(early)
    torch.testing.assert_close(early(x).logits, late(x).logits, **CLOSE)
    model = plain()
    mnemos.fast(model)
    refuses(r"mnemos\.fast\); undo that first", mnemos.linearise, model, window=3, sinks=1)


def test_another_kernel_that_is_asked_for_computes(calls, monkeypatch):
    model, x = MODELS["Llama"](), tokens(2, LENGTH)
    mnemos.fast(model)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = model(x).logits.square().mean()
        (first,) = torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)
        first.square().sum().backward()  # PyTorch's products can be differentiated twice
    assert not calls
    pictures, ours = vit(1), []
    mnemos.fast(pictures)
    usual = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *x, **y: ours.append(1) or usual(*x, **y)
    )
    pictures(torch.randn(1, 3, 32, 32))
    assert ours
    assert not calls
