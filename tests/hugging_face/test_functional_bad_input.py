"""What `mnemos.functional` refuses, in one line that says what to do."""

import copy

import pytest
import torch
from functional_models import build, step_of, tokens

import mnemos
from mnemos import InputError
from mnemos.hugging_face import MnemosForCausalLM, RememberingForCausalLM
from mnemos.libraries import transformers

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 17}


def refused(make, *words):
    with pytest.raises(InputError) as error:
        make()
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        ("BertLMHeadModel", SMALL, "change with later tokens"),
        ("LlamaForSequenceClassification", {"pad_token_id": 0, "num_labels": 3}, "returned (2, 3) for two rows of two"),
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
    library = transformers()
    model = getattr(library, kind)
    refused(lambda: mnemos.functional(model(model.config_class(**{**SMALL, **sizes}))), "expected", words)


def test_models_of_ours_in_transformers():
    ours = MnemosForCausalLM.of(mnemos.Transformer(vocab_size=17, dim=8, layers=1, num_heads=2, mlp=8))
    remembering = RememberingForCausalLM.of(mnemos.remember(build("GPT2"), tokens=2), segment=4)
    for model in (ours, remembering):
        refused(lambda model=model: mnemos.functional(model), type(model).__name__, "y, state = model.model(x, state)")
        x = tokens(2, 5)
        y, state = model.model(x)  # what the error says
        assert y.shape[:2] == x.shape
        assert state is not None


def test_other_modules():
    for name in ("Rwkv", "RecurrentGemma", "xLSTM"):
        refused(lambda name=name: mnemos.functional(build(name)), f"{name}ForCausalLM")
    refused(lambda: mnemos.functional(torch.nn.Linear(2, 2)), "Hugging Face Transformers", "Linear")
    compiled = torch.compile(build("Mamba"), backend="eager")
    refused(lambda: mnemos.functional(compiled), "OptimizedModule", "the model itself, without torch.compile")


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_adapters_that_put_tokens_before_every_call(kind):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=2)
    refused(lambda: mnemos.functional(peft.get_peft_model(build("Llama"), config)), "puts tokens before", "LoRA")


def test_models_that_were_changed():
    model = build("GPT2")
    mnemos.cache(model, mnemos.GRC(length=4, block=3))
    refused(lambda: mnemos.functional(model), 'scope="stream"', "shared")
    more = build("Llama")
    more.config = copy.deepcopy(more.config)  # the model inside, which runs both layers, keeps its own
    more.config.num_hidden_layers = 1
    refused(lambda: mnemos.functional(more), "expected 1 layers", "found a layer 1")


def test_layers_are_named_in_errors():
    named = step_of("Gemma2")._layout.named
    assert named(0) == "'sliding_attention' in layer 0 of Gemma2ForCausalLM"
    assert named(1) == "'full_attention' in layer 1 of Gemma2ForCausalLM"
    for number in (2, -1, None):
        assert named(number) == "another kind in Gemma2ForCausalLM"


def test_states_of_others():
    mamba, jamba, x = step_of("Mamba"), step_of("Jamba"), tokens(2, 4)
    state = mamba(x)[1]
    refused(lambda: mamba(x, jamba(x)[1]), "MambaForCausalLM", "3")
    refused(lambda: step_of("FalconMamba")(x, step_of("Llama")(x)[1]), "another model in layer 0")
    for name, options in (
        ("Mamba", {"state_size": 5}),
        ("Mamba", {"conv_kernel": 3}),
        ("Llama", {"num_key_value_heads": 4}),
        ("Llama", {"head_dim": 6}),
    ):
        other = mnemos.functional(build(name, **options))(x)[1]
        refused(lambda name=name, other=other: step_of(name)(x, other), "another model in layer 0")
    refused(lambda: mamba(x, 3), "int")
    refused(lambda: mamba(x[:1], state), "1 rows", "2")


def test_inputs():
    step, x = step_of("GPT2"), tokens(2, 4)
    refused(lambda: step(x.float()), "token ids", "float32 of shape (2, 4)")
    refused(lambda: step(torch.randn(2, 4, 3)), "embeddings [B, T, 16]")
    refused(lambda: step(x, None, torch.ones(2, 3).bool()), "mask (2, 4)", "(2, 3)")
    refused(lambda: step(x, None, torch.ones(2, 4)), "booleans")
    refused(lambda: step(tokens(1, 65)), "65 tokens")
    for ids, found in ((x + 17, "to 33"), (x - 17, "found -")):
        refused(lambda ids=ids: step(ids), "token ids from 0 to 16", found, "tokenizer")


def test_gradient_checkpointing_of_the_library():
    for name in ("Llama", "Mamba"):  # up to 5.23 Mamba's layers keep the cache, and read it again in backward
        model = build(name)
        step = mnemos.functional(model)
        model.train().activation_checkpointing_enable()
        refused(lambda step=step: step(tokens(2, 4))[0].sum().backward(), "turn gradient checkpointing")
