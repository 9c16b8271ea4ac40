"""`mnemos.functional` of models that number positions in their own way: after the padding token, or from the cache."""

import functools

import pytest
import torch
from functional_models import in_pieces, tokens

import mnemos
from mnemos import InputError
from mnemos.libraries import transformers

CLOSE = {"rtol": 0, "atol": 1e-5}
ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "is_decoder": True,
    "pad_token_id": 1,
}
BART = {
    "d_model": 16,
    "encoder_layers": 1,  # which `num_hidden_layers` is another name of
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "is_decoder": True,
    "is_encoder_decoder": False,
}
SIZES = {
    "RobertaForCausalLM": ENCODER,
    "BloomForCausalLM": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "BartForCausalLM": BART,
    "RoFormerForCausalLM": {**ENCODER, "embedding_size": 16},
    "GitForCausalLM": {**ENCODER, "vision_config": {"image_size": 32, "patch_size": 16}},
}
TOGETHER = pytest.mark.parametrize("name", ["BartForCausalLM", "RoFormerForCausalLM", "GitForCausalLM"])


def build(name):
    kind = getattr(transformers(), name)
    torch.manual_seed(0)
    model = kind(kind.config_class(vocab_size=17, **SIZES[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return model


@functools.cache
def step_of(name):
    return mnemos.functional(build(name))


@pytest.mark.parametrize("name", SIZES)
@torch.no_grad()
def test_outputs_are_those_of_the_plain_forward(name):
    step, x = step_of(name), tokens(2, 9)
    plain = step.model(x, use_cache=False).logits
    torch.testing.assert_close(step(x)[0], plain, **CLOSE)
    torch.testing.assert_close(in_pieces(step, x, [3, 1, 5])[0], plain, **CLOSE)
    torch.testing.assert_close(step(step.model.get_input_embeddings()(x))[0], plain, **CLOSE)


@pytest.mark.parametrize("name", ["RobertaForCausalLM", "BloomForCausalLM"])
@torch.no_grad()
def test_rows_apart_equal_the_plain_forward_of_each(name):
    step, x = step_of(name), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, [0, 3, 8]] = False
    y, state = step(x, None, mask)
    torch.testing.assert_close(y[1, mask[1]], step.model(x[1:, mask[1]]).logits[0], **CLOSE)
    new = mnemos.reset(state, torch.tensor([True, False]))
    torch.testing.assert_close(step(x, new)[0][0], step.model(x[:1]).logits[0], **CLOSE)


@TOGETHER
@torch.no_grad()
def test_rows_apart_are_refused_where_positions_cannot_be_set(name):
    step, x = step_of(name), tokens(2, 6)
    _, state = step(x[:, :4])
    apart = mnemos.reset(state, torch.tensor([True, False]))
    joined = mnemos.join([step(x[:1, :2])[1], mnemos.select(state, torch.tensor([1]))])
    for given, mask, found in (
        (None, torch.arange(6) >= torch.tensor([[0], [2]]), "a mask with padding"),
        (apart, None, "0 to 4 tokens"),
        (joined, None, "2 to 4 tokens"),
    ):
        with pytest.raises(InputError, match=found) as error:
            step(x, given, mask)
        assert "\n" not in str(error.value)
    assert not step.rows_apart


@TOGETHER
@torch.no_grad()
def test_rows_of_one_length_are_read_where_positions_cannot_be_set(name):
    step, x = step_of(name), tokens(2, 9)
    plain = step.model(x, use_cache=False).logits
    _, state = step(x[:, :4], None, torch.ones(2, 4, dtype=torch.bool))
    new = mnemos.reset(state, torch.tensor([True, True]))  # its keys are those of four tokens
    torch.testing.assert_close(step(x, new)[0], plain, **CLOSE)
    short = mnemos.select(mnemos.join([state, step(x[:, :2])[1]]), torch.tensor([2, 3]))
    torch.testing.assert_close(step(x[:, 2:], short)[0], plain[:, 2:], **CLOSE)


def test_half_precision_does_not_hide_where_positions_come_from():
    kind = transformers().GitForCausalLM
    new = kind(kind.config_class(vocab_size=17, **SIZES["GitForCausalLM"]))  # its weights are small
    assert not mnemos.functional(new.bfloat16()).rows_apart


def test_other_positions_are_refused():
    model = build("RobertaForCausalLM")
    model.config.pad_token_id = None  # of the configuration; its embeddings begin after token 1 as before
    with pytest.raises(InputError, match="expected positions from 0") as error:
        mnemos.functional(model)
    assert "\n" not in str(error.value)
