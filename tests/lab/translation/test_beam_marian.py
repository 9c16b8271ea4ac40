"""Translation models of transformers with our classes: the same logits, and the same beam search token by token."""

import pytest
import torch
from refusals import refuses

from mnemos import BeamConfig, Pair, beam_search, libraries
from mnemos.lab.translation.marian import from_marian

VOCABULARY, EOS, PAD = 30, 0, 29
NAMES = {True: "early", False: "heuristic", "never": "never"}


def host(seed=0, **fields):
    """A MarianMTModel of random weights that ends sentences at lengths from 1 on."""
    found = libraries.transformers()
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64, "init_std": 0.4}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")}
    tokens = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD, "forced_eos_token_id": None}
    config = found.MarianConfig(**({"vocab_size": VOCABULARY, "scale_embedding": True} | sizes | tokens | fields))
    model = found.MarianMTModel(config).double().eval()
    model.final_logits_bias.normal_().mul_(0.3)
    model.final_logits_bias[0, EOS] += 3
    return model


def sentences():
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(9) < torch.tensor([9, 5, 7, 9, 3, 8])[:, None]
    return torch.randint(1, PAD, (6, 9), generator=generator), mask


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 30, "activation_function": "relu"},
        {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False, "scale_embedding": False},
    ],
    ids=["shared", "separate", "untied"],
)
def test_logits_equal_those_of_the_host(fields):
    theirs = host(**fields)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():  # norms begin alike
            parameter += 0.1 * torch.randn_like(parameter) * ("norm" in name)
        ours, (source, mask) = from_marian(theirs), sentences()
        expected = theirs(input_ids=source, attention_mask=mask.long(), decoder_input_ids=source[:, :7]).logits
        found, _ = ours(Pair(source, source[:, :7], mask))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("penalty", [0.0, 0.6])
def test_the_search_equals_that_of_the_host_token_by_token(penalty):
    lengths = set()
    theirs, (source, mask), start = host(1), sentences(), torch.full((6, 1), PAD)
    ours = from_marian(theirs)
    for stopping in NAMES:
        given = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 10, "length_penalty": penalty}
        given |= {"early_stopping": stopping, "return_dict_in_generate": True, "output_scores": True}
        with torch.no_grad():
            expected = theirs.generate(source, attention_mask=mask.long(), do_sample=False, **given)
        config = BeamConfig(eos=EOS, beams=4, n_best=4, max_length=10, length_penalty=penalty, stopping=NAMES[stopping])
        found = [h for hypotheses in beam_search(ours, ours.encode(source, mask), start, config) for h in hypotheses]
        for h, tokens, score in zip(found, expected.sequences, expected.sequences_scores, strict=True):
            whole = tokens[1:].tolist()
            whole = whole[: whole.index(EOS) + 1] if EOS in whole else whole
            assert h.tokens.tolist() == whole
            assert h.score == pytest.approx(score.item(), rel=1e-5)
            lengths.add(len(whole))
    assert len(lengths) > 4


def test_other_models_are_refused():
    refuses(r"expected a transformers.MarianMTModel, found Linear", from_marian, torch.nn.Linear(2, 2))
    refuses("the same heads and MLP width", from_marian, host(decoder_ffn_dim=12))
