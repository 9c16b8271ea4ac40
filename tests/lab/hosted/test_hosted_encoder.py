"""An encoder that reads texts in segments: what the class is read from, what is carried, frozen and added."""

import json
from dataclasses import replace

import pytest
import torch
from refusals import refuses

from mnemos import GRC, libraries
from mnemos.hosts import carry
from mnemos.lab.compare.baselines import equal_parameters, parameters
from mnemos.lab.hosted.decoder import HostedDecoderConfig
from mnemos.lab.hosted.encoder import HostedEncoderConfig
from mnemos.lab.run.recipe import Recipe, unwritten
from mnemos.lab.tasks.text_classes import TextClassesConfig
from mnemos.memory import caches
from mnemos.types import InputError

libraries.transformers()
PLAIN = HostedEncoderConfig(vocab_size=30, classes=3, segment=4)
CACHED = replace(PLAIN, cache=GRC(length=3, scope="stream"))


def small_bert(positions):
    """The settings of an encoder of so many positions."""
    return json.dumps({**json.loads(PLAIN.host), "max_position_embeddings": positions})


def built(config):
    """The model with weights that matter: a new head and gates hide what is carried."""
    torch.manual_seed(0)
    model = config.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("config", [PLAIN, CACHED, unwritten(Recipe(CACHED, TextClassesConfig())).model])
@pytest.mark.each_value
def test_rows_are_read_segment_by_segment_whatever_their_lengths(config):
    x = torch.randint(30, (3, 11))
    lengths = (11, 7, 3)
    mask = torch.arange(11) < torch.tensor(lengths)[:, None]
    for read in ("mean", "last"):
        model = built(replace(config, read=read))
        logits = model(x, mask=mask)[0]
        for row, n in enumerate(lengths):
            state, found = None, []
            for segment in x[row : row + 1, :n].split(4, 1):
                if config.cache is None:
                    output = model.host(segment)
                else:
                    output, state = carry(model.host, state, segment)
                found.append(model.head(output.last_hidden_state.mean(1)))
            expected = found[-1] if read == "last" else torch.stack(found).mean(0)
            torch.testing.assert_close(logits[row : row + 1], expected)


def test_what_is_frozen_gets_no_gradient_no_dropout_and_no_cache():
    model = replace(CACHED, frozen=1).build().train()
    model(torch.randint(30, (2, 9)))[0].sum().backward()
    kept = [name for name, p in model.named_parameters() if p.grad is None]
    assert {name.split(".")[1] for name in kept} == {"embeddings", "encoder"}
    assert not any(".layer.1." in name for name in kept)
    assert len(caches(model)) == 1
    assert not model.host.encoder.layer[0].training
    assert model.host.encoder.layer[1].training
    with pytest.raises(InputError, match=r"fewer layers than the 2 of the host.*found 2"):
        replace(CACHED, frozen=2).build()


@pytest.mark.parametrize(
    ("config", "host", "words"),
    [
        (PLAIN, '{"model_type": "t5", "d_model": 8}', "host: expected an encoder of texts, found t5; choose one"),
        (PLAIN, '{"model_type": "vit"}', "expected an encoder of texts, found vit; choose one"),
        (
            HostedDecoderConfig(),
            '{"model_type": "vit"}',
            "host: expected a model of transformers for CausalLM, found vit ",
        ),
        (HostedDecoderConfig(), '{"model_type": "no"}', 'as JSON, found \'{"model_type": "no"}\' .ValueError: '),
        (HostedDecoderConfig(), "{", r"settings of a model of transformers as JSON, found '{' \(JSONDecodeError: "),
        (replace(CACHED, adapter=2), small_bert(8), "adapter: expected 0 beside a cache, .* found 2; choose one of"),
        (replace(PLAIN, segment=9), small_bert(8), "segment: expected at most the 8 positions of the host, found 9"),
        (replace(CACHED, cache=GRC()), small_bert(8), "cache.scope: expected stream, a cache per text, found shared"),
    ],
)
def test_hosts_of_another_kind_and_settings_that_do_not_fit_are_refused(config, host, words):
    refuses(words, replace(config, host=host).build)
    replace(PLAIN, host=small_bert(8), segment=8).build()


@pytest.mark.parametrize("config", [PLAIN, CACHED])
def test_texts_without_a_valid_token_are_of_no_class(config):
    model = config.build().eval()
    y, _ = model(torch.randint(30, (2, 9)), mask=torch.zeros(2, 9, dtype=torch.bool))
    assert torch.equal(y, model.head(torch.zeros(2, model.head.in_features)))


def test_a_segment_has_at_most_the_positions_behind_that_of_padding():
    host = json.dumps({**json.loads(small_bert(8)), "model_type": "roberta", "pad_token_id": 1})
    refuses(
        "segment: expected at most the 6 positions of the host, found 7", replace(PLAIN, host=host, segment=7).build
    )
    model = replace(PLAIN, host=host, segment=6).build()
    assert model(torch.randint(2, 30, (1, 13)))[0].isfinite().all()


def test_the_baseline_of_equal_parameters_has_adapters_that_start_as_nothing():
    wider = equal_parameters(Recipe(replace(CACHED, frozen=1), TextClassesConfig(), name="cached"))
    assert wider.model.cache is None
    assert wider.model.adapter > 0
    assert abs(parameters(wider.model) / parameters(replace(CACHED, frozen=1)) - 1) < 0.001
    x = torch.randint(30, (2, 9))
    torch.manual_seed(0)
    adapted = wider.model.build().eval()
    torch.manual_seed(0)
    plain = PLAIN.build().eval()
    assert torch.equal(adapted(x)[0], plain(x)[0])
    adapted(x)[0].square().sum().backward()
    assert adapted.host.encoder.layer[1].attention.self.adapter.second.weight.grad.abs().max() > 0
    assert not hasattr(adapted.host.encoder.layer[0].attention.self, "adapter")
