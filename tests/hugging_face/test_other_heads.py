"""An encoder-decoder and classifiers of this library in Transformers."""

import pytest
import torch
from contract_cases import ModelCase, scatter
from refusals import refuses

import mnemos
from mnemos.hugging_face import MnemosConfig, MnemosForSeq2SeqLM, MnemosForSequenceClassification
from mnemos.libraries import cache_name, transformers

BOS, EOS, PAD = 1, 2, 0
SOURCE = torch.randint(3, 13, (3, 8), generator=torch.Generator().manual_seed(2))
MASK = torch.ones_like(SOURCE)
MASK[1, :3], MASK[2, 5:] = 0, 0
TOKENS = {"decoder_start_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


@pytest.fixture(scope="module")
def pair():
    case = ModelCase("encoder-decoder", mnemos.GRC(length=3), True)
    ours = case.build(share="target", source_vocab_size=13).eval()
    return ours, MnemosForSeq2SeqLM.of(ours, **TOKENS)


def rows():
    return [row[valid.bool()][None] for row, valid in zip(SOURCE, MASK, strict=True)]


def test_translations_are_those_of_our_own_search(pair, tmp_path):
    ours, model = pair
    model.save_pretrained(tmp_path)
    loaded = transformers().AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    options = {"do_sample": False, "max_new_tokens": 6}
    found = loaded.generate(SOURCE, attention_mask=MASK, num_beams=3, **options)
    config = mnemos.BeamConfig(eos=EOS, beams=3, max_length=6, stopping="heuristic")
    for row, tokens in zip(rows(), found.tolist(), strict=True):
        best = mnemos.beam_search(ours, ours.encode(row), torch.tensor([[BOS]]), config)[0][0].tokens.tolist()
        assert tokens == [BOS, *best] + [PAD] * (len(tokens) - 1 - len(best))
    greedy = loaded.generate(SOURCE[:1], **options)
    loaded.generation_config.assistant_confidence_threshold = 0.0
    assert torch.equal(loaded.generate(SOURCE[:1], assistant_model=loaded, **options), greedy)
    assert loaded.model.head.weight is loaded.model.embedding.weight


def test_loss_of_labels_is_that_of_a_pair(pair):
    ours, model = pair
    labels = torch.tensor([[5, 6, EOS], [7, EOS, -100], [8, 9, EOS]])
    total = 0
    for row, targets in zip(rows(), labels, strict=True):
        targets = targets[targets >= 0]
        logits, _ = ours(mnemos.Pair(row, torch.cat([torch.tensor([BOS]), targets[:-1]])[None]))
        total = total - logits.log_softmax(-1)[0].gather(1, targets[:, None]).sum()
    output = model(SOURCE, attention_mask=MASK, labels=labels)
    torch.testing.assert_close(output.loss, total / 8, check_dtype=False, rtol=1e-6, atol=1e-6)
    output.loss.backward()
    model.zero_grad()


def test_what_a_translator_reads_and_returns(pair):
    _, model = pair
    labels, name = torch.tensor([[5, -100, 6, EOS]] * 3), cache_name()
    other = MnemosForSeq2SeqLM.of(model.model, decoder_start_token_id=BOS, pad_token_id=4)
    inputs = other.prepare_decoder_input_ids_from_labels(labels)
    assert inputs.tolist() == [[BOS, 5, 4, 6]] * 3
    encoded = model.get_encoder()(SOURCE, MASK)
    given = {"attention_mask": MASK, "decoder_input_ids": inputs}
    with torch.no_grad():
        output = model(SOURCE, **given)
        again = model(encoder_outputs=encoded, **given, logits_to_keep=2, return_dict=False)
        assert torch.equal(again[0], output.logits[:, -2:])
        assert torch.equal(output.encoder_last_hidden_state, encoded[0])
        assert output[name].get_seq_length() == 4
        following = {"decoder_input_ids": labels[:, -1:], name: output[name]}
        both = torch.cat([inputs, labels[:, -1:]], 1)
        whole = model(SOURCE, attention_mask=MASK, decoder_input_ids=both).logits[:, -1:]
        torch.testing.assert_close(model(**following).logits, whole)
    for options, carries in (({"labels": labels}, False), ({"use_cache": False}, False), ({}, True)):
        assert (model(SOURCE, **given, **options).get(name) is not None) == carries
    assert model(SOURCE, **given, labels=labels, use_cache=True).get(name) is not None
    refuses("decoder_input_ids .* found neither", model, SOURCE)
    refuses("encoder_outputs, found neither", model, decoder_input_ids=inputs)
    refuses("decoder_start_token_id, found none", MnemosForSeq2SeqLM.of(model.model), SOURCE, labels=labels)
    refuses("pairs, found 'transformer'; use MnemosForCausalLM", MnemosForSeq2SeqLM, MnemosConfig())


# Reformer: padding at the end of a row would change what its tokens attend to.
@pytest.mark.parametrize("attention", [mnemos.SoftmaxConfig(), mnemos.ReformerConfig(rounds=1, chunk=2)])
def test_a_classifier_reads_a_padded_row_as_alone(attention, tmp_path):
    head = mnemos.HeadConfig(classes=3, pool="mean")
    sizes = {"vocab_size": 13, "dim": 12, "layers": 1, "num_heads": 2, "mlp": 16}
    torch.manual_seed(0)
    config = MnemosConfig(model=mnemos.TransformerConfig(causal=False, head=head, attention=attention, **sizes))
    model = scatter(MnemosForSequenceClassification(config)).eval()
    output = model(SOURCE, attention_mask=MASK, labels=torch.tensor([0, 2, 1]))
    alone = torch.cat([model(row).logits for row in rows()])
    torch.testing.assert_close(output.logits, alone, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(alone, torch.tensor([0, 2, 1])))
    again = MnemosForSequenceClassification.of(model.model)
    assert torch.equal(again(SOURCE, attention_mask=MASK).logits, output.logits)
    refuses("with 4 classes, found 3", MnemosForSequenceClassification.of, model.model, num_labels=4)
    model.save_pretrained(tmp_path)
    loaded = transformers().AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded(SOURCE, attention_mask=MASK).logits, output.logits)


def test_a_language_model_becomes_a_classifier(tmp_path):
    config = mnemos.TransformerConfig(vocab_size=13, dim=12, layers=1, num_heads=2, head=mnemos.HeadConfig(tied=True))
    language = mnemos.hugging_face.MnemosForCausalLM(MnemosConfig(model=config))
    language.save_pretrained(tmp_path)
    model = MnemosForSequenceClassification.from_pretrained(tmp_path, num_labels=4)
    assert torch.equal(model.model.embedding.weight, language.model.embedding.weight)
    assert model.model.head.weight.shape == (4, 12)
    assert model.model.head.weight.std() > 0.05  # initialised, not left as it lay in memory
    model.save_pretrained(tmp_path / "classes")
    other = MnemosForSequenceClassification.from_pretrained(
        tmp_path / "classes", num_labels=1, ignore_mismatched_sizes=True
    )
    assert torch.equal(other.model.embedding.weight, language.model.embedding.weight)
    assert other(SOURCE, labels=torch.rand(3)).logits.shape == (3, 1)
    assert other.config.of_model().head.classes == 1
    refuses("expected a model with 2 classes, found 0", MnemosForSequenceClassification.of, language.model)
    refuses("head of classes", MnemosForSequenceClassification, MnemosConfig(model=mnemos.LSTMConfig()))
