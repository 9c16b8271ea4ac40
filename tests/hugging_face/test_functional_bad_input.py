"""What `mnemos.functional` refuses, in one line that says what to do."""

import copy

import pytest
import torch
from functional_models import build, step_of, tokens
from refusals import refuses

import mnemos
from mnemos.hugging_face import MnemosForCausalLM, RememberingForCausalLM
from mnemos.libraries import transformers

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 17}


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        ("BertLMHeadModel", SMALL, "change with later tokens"),
        ("LlamaForSequenceClassification", {"pad_token_id": 0, "num_labels": 3}, r"returned \(2, 3\) for two rows of"),
        ("T5ForConditionalGeneration", {"d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 8}, "encoder"),
        (
            "Lfm2ForCausalLM",
            {"layer_types": ["full_attention", "conv"], "num_hidden_layers": 2, "num_key_value_heads": 2},
            "found 'conv' in layer 1 of Lfm2ForCausalLM",
        ),
        (
            "Llama4ForCausalLM",
            {"intermediate_size_mlp": 8, "num_local_experts": 2, "layer_types": ["chunked_attention"]},
            "found 'chunked_attention' in layer 0 of Llama4ForCausalLM",
        ),
        ("CpmAntForCausalLM", {"dim_head": 4, "dim_ff": 8}, "the ids of all earlier tokens"),
    ],
)
def test_models_without_a_causal_state_that_is_known(kind, sizes, words):
    model = getattr(transformers(), kind)
    refuses(f"expected.*{words}", mnemos.functional, model(model.config_class(**{**SMALL, **sizes})))


def test_models_of_ours_in_transformers():
    ours = MnemosForCausalLM.of(mnemos.Transformer(vocab_size=17, dim=8, layers=1, num_heads=2, mlp=8))
    remembering = RememberingForCausalLM.of(mnemos.remember(build("GPT2"), tokens=2), segment=4)
    for model in (ours, remembering):
        refuses(rf"{type(model).__name__}.* y, state = model\.model\(x, state\)", mnemos.functional, model)
        x = tokens(2, 5)
        y, state = model.model(x)  # what the error says
        assert y.shape[:2] == x.shape
        assert state is not None


def test_other_modules_and_models_that_were_changed():
    shared, shorter = build("GPT2"), build("Llama")
    mnemos.cache(shared, mnemos.GRC(length=4, block=3))
    shorter.config = copy.deepcopy(shorter.config)  # the model inside, which runs both layers, keeps its own
    shorter.config.num_hidden_layers = 1
    for model, words in (
        *((build(name), f"{name}ForCausalLM") for name in ("Rwkv", "RecurrentGemma", "xLSTM")),
        (torch.nn.Linear(2, 2), "Hugging Face Transformers.*Linear"),
        (torch.compile(build("Mamba"), backend="eager"), "OptimizedModule.*the model itself, without torch.compile"),
        (shared, 'scope="stream".*shared'),
        (shorter, "expected 1 layers.*found a layer 1"),
    ):
        refuses(words, mnemos.functional, model)


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_adapters_that_put_tokens_before_every_call(kind):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=2)
    refuses("LoRA.*puts tokens before", mnemos.functional, peft.get_peft_model(build("Llama"), config))


def test_layers_are_named_in_errors():
    named = step_of("Gemma2")._layout.named
    assert named(1) == "'full_attention' in layer 1 of Gemma2ForCausalLM"
    for number in (2, -1, None):
        assert named(number) == "another kind in Gemma2ForCausalLM"


def test_states_of_others():
    mamba, x = step_of("Mamba"), tokens(2, 4)
    state = mamba(x)[1]
    refuses("MambaForCausalLM.*3", mamba, x, step_of("Jamba")(x)[1])
    refuses("another model in layer 0", step_of("FalconMamba"), x, step_of("Llama")(x)[1])
    for name, options in (
        ("Mamba", {"state_size": 5}),
        ("Mamba", {"conv_kernel": 3}),
        ("Llama", {"num_key_value_heads": 4}),
        ("Llama", {"head_dim": 6}),
    ):
        refuses("another model in layer 0", step_of(name), x, mnemos.functional(build(name, **options))(x)[1])
    refuses("int", mamba, x, 3)
    refuses("1 rows.*2", mamba, x[:1], state)


def test_inputs():
    step, x = step_of("GPT2"), tokens(2, 4)
    for given, words in (
        ((x.float(),), r"token ids.*float32 of shape \(2, 4\)"),
        ((torch.randn(2, 4, 3),), r"embeddings \[B, T, 16\]"),
        ((x, None, torch.ones(2, 3).bool()), r"mask \(2, 4\).*\(2, 3\)"),
        ((x, None, torch.ones(2, 4)), "booleans"),
        ((tokens(1, 65),), "65 tokens"),
        ((x + 17,), "token ids from 0 to 16.* to 33.*tokenizer"),
        ((x - 17,), "token ids from 0 to 16.*found -.*tokenizer"),
    ):
        refuses(words, step, *given)


def test_gradient_checkpointing_of_the_library():
    for name in ("Llama", "Mamba"):  # up to 5.23 Mamba's layers keep the cache, and read it again in backward
        model = build(name)
        step = mnemos.functional(model)
        model.train().activation_checkpointing_enable()
        refuses("turn gradient checkpointing", lambda step=step: step(tokens(2, 4))[0].sum().backward())
