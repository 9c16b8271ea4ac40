"""Adapters of PEFT (LoRA) around decoders with memories of ours, and around our models: trained, saved and merged."""

import pytest
import torch
from refusals import refuses

import mnemos
from mnemos.hugging_face import MnemosForCausalLM
from mnemos.libraries import cache_name, transformers

pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
from trainer_standins import documents, made, read_again, trainer_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")
CASES = {
    "cached": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["grc"]},
    "remembering": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "modules_to_save": ["memory"]},
    "linear": {"target_modules": ["qkv", "expand", "contract"]},
}
IDS = torch.tensor([documents()[1]["input_ids"]])
OPTIONS = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(IDS)}


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize(
    "name", ["cached", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("remembering", "linear"))]
)
def test_adapters_and_memories_are_trained_saved_read_and_merged(name, tmp_path):
    plain = logits(made(name))
    adapted = peft.get_peft_model(made(name), peft.LoraConfig(r=2, **CASES[name]))
    torch.testing.assert_close(logits(adapted), plain, rtol=0, atol=0)
    before = {n: p.detach().clone() for n, p in adapted.named_parameters()}
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(adapted, tmp_path, **options)
    trainer.train()
    moved = {n for n, p in adapted.named_parameters() if not torch.equal(p, before[n])}
    trained = {n for n, p in adapted.named_parameters() if p.requires_grad}
    assert moved == trained
    memory = CASES[name].get("modules_to_save", [""])[0]
    assert any(f"{memory}.modules_to_save" in n or not memory for n in trained)

    resumed = peft.get_peft_model(made(name), peft.LoraConfig(r=2, **CASES[name]))
    trainer_of(resumed, tmp_path, **options).train(str(tmp_path / "checkpoint-2"))
    assert all(map(torch.equal, resumed.parameters(), adapted.parameters()))

    trainer.save_model(tmp_path / "saved")
    loaded = peft.PeftModel.from_pretrained(made(name), tmp_path / "saved")
    expected, text = logits(adapted), adapted.generate(input_ids=IDS, **OPTIONS)
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=0)
    assert torch.equal(loaded.eval().generate(input_ids=IDS, **OPTIONS), text)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(read_again(name, tmp_path / "merged")), logits(merged))


@torch.no_grad()
@pytest.mark.parametrize("mix", ["heads", "channels"])
def test_a_wrapped_branch_of_a_decoder_skips_padding_and_carries_its_state(mix):
    """PEFT's `modules_to_save` wraps the branch; LoRA wraps the projection that it is mixed in at."""

    def decoder():
        torch.manual_seed(0)
        library = transformers()
        sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = library.LlamaForCausalLM(library.LlamaConfig(vocab_size=30, num_key_value_heads=1, **sizes))
        mnemos.cache(model, mnemos.GRC(scope="stream", length=4, block=3, mix=mix, gate_init=1.0))
        return model.eval()

    ids, mask = torch.randint(30, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[0, :7] = 0
    expected = decoder()(ids, attention_mask=mask).logits[:, -1]
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], modules_to_save=["grc"])
    adapted = peft.get_peft_model(decoder(), config).eval()
    torch.testing.assert_close(adapted(ids, attention_mask=mask).logits[:, -1], expected)
    past = adapted(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True)[cache_name()]
    step = adapted(ids[:, -1:], attention_mask=mask, **{cache_name(): past}).logits[:, -1]
    torch.testing.assert_close(step, expected)
    merged = adapted.merge_and_unload().eval()
    torch.testing.assert_close(merged(ids, attention_mask=mask).logits[:, -1], expected)


@torch.no_grad()
def test_a_wrapped_state_is_seen_and_merged_before_it_is_changed(tmp_path):
    """What an adapter trains is its copy of the state, beside the decoder's own."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["linearised"])
    model = made("cached")
    mnemos.uncache(model)
    mnemos.linearise(model, window=3, sinks=1, rank=2)
    adapted = peft.get_peft_model(model, config).eval()
    for parameter in adapted.parameters():
        parameter += 0.1 * torch.randn_like(parameter) * parameter.requires_grad
    expected = logits(adapted)
    pieces, file = [IDS[0]], tmp_path / "adapter"
    for call, message in [
        (lambda: mnemos.linearise(adapted, window=4), "linearised already"),
        (lambda: mnemos.rank_attentions(adapted, pieces, window=3, sinks=1, first=5), "found a linearised one"),
        (lambda: mnemos.hosts.save_adapter(adapted, file), "merge_and_unload"),
        (lambda: mnemos.hosts.merge_updates(adapted), "merge_and_unload"),
        (lambda: mnemos.unlinearise(adapted), "merge_and_unload"),
    ]:
        refuses(message, call)
        assert torch.equal(logits(adapted), expected)
    merged = mnemos.hosts.merge_updates(adapted.merge_and_unload())
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_on_weights_that_are_read_directly_is_refused():
    model = mnemos.Transformer(
        vocab_size=30, dim=16, layers=1, num_heads=2, mlp=8, cache=mnemos.GRC(length=4, block=3, scope="stream")
    )
    adapted = peft.get_peft_model(MnemosForCausalLM.of(model), peft.LoraConfig(target_modules=["query", "update_gate"]))
    refuses("adapter", adapted, IDS)
